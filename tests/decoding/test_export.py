"""Exported heads: from what was written alone, the equations give what the head itself gives."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from transformers import LlamaConfig

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.export import export_head, public_tensors
from deepenough.hf.adapter import adapt
from tests.decoding.eagle3_ref import HeadRef, drafts_ref
from tests.decoding.test_eagle3 import WORDS, make_head, make_linear

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture
def served(make_model):
    """A model of as many layers as engines ask for, and its draft model."""
    model = make_model(num_hidden_layers=7)
    linear = make_linear()
    linear.meta["model"] = adapt(model).identity()
    return model, DraftModel(linear, make_head(model))


@pytest.mark.parametrize(("to", "layer"), [("vllm", "layers.0."), ("sglang", "midlayer.")])
def test_a_folder_holds_the_head(served, tmp_path, to, layer) -> None:
    model, draft_model = served
    folder = export_head(draft_model, model, to, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = config["transformer_layer_config"] if to == "vllm" else config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["norm_before_residual"] is False and config["draft_vocab_size"] == len(WORDS)
    assert tensors["t2d"].nonzero().flatten().tolist() == WORDS.tolist()
    llama = LlamaConfig(**sizes)
    assert (llama.num_hidden_layers, llama.hidden_size, llama.head_dim) == (1, 32, 8)
    if to == "vllm":
        assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    else:
        counted = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert counted == [1, 2, 3]  # outputs of layers
        assert torch.equal(tensors["embed_tokens.weight"], model.get_input_embeddings().weight)
    own = {name.replace(layer, "midlayer."): tensor for name, tensor in tensors.items()}
    context = [5, 6, 7, 8, 9, 10]
    states = model(torch.tensor([context[:-1]]), output_hidden_states=True).hidden_states
    inputs = torch.cat([states[layer][0] for layer in (2, 3, 4)], dim=-1)
    _, logits = drafts_ref(HeadRef(own, sizes), model.get_input_embeddings(), context, inputs, 1)
    embeddings = model.get_input_embeddings()(torch.tensor([context[1:]]))
    head = draft_model.head
    expected = head.logits(head(embeddings, inputs[None])[0][0, -1])
    torch.testing.assert_close(logits[0].float(), expected, rtol=1e-4, atol=1e-4)


def write_gguf(path: Path) -> Path:
    """A file of the model, as far as an export reads it."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{number}" for number in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_holds_the_head_and_the_tokenizer(served, tmp_path) -> None:
    model, draft_model = served
    with pytest.raises(UserError, match="give that file with --gguf"):
        export_head(draft_model, model, "llama.cpp", tmp_path / "out")
    source = write_gguf(tmp_path / "model.gguf")
    path = export_head(draft_model, model, "llama.cpp", tmp_path / "out", str(source))
    file = GGUFReader(str(path))
    found = {name: field.contents() for name, field in file.fields.items()}
    assert found["general.architecture"] == "eagle3" and found["eagle3.block_count"] == 1
    assert found["eagle3.target_layers"] == [2, 3, 4]
    assert found["eagle3.norm_before_residual"] is False
    assert found["tokenizer.ggml.tokens"] == [f"w{number}" for number in range(40)]
    assert found["tokenizer.ggml.token_type"] == [1] * 40
    assert found["tokenizer.ggml.add_bos_token"] is True
    expected = public_tensors(draft_model.head)
    seen = set()
    for tensor in file.tensors:
        data = torch.from_numpy(np.array(tensor.data))
        if tensor.name == "d2t":
            assert data.flatten().tolist() == WORDS.tolist()
            continue
        part = tensor.name.removesuffix(".weight")
        name = {"output": "lm_head", "output_norm": "norm", "fc": "fc"}.get(part)
        if name is None:
            name = f"midlayer.{NAMES[part.removeprefix('blk.0.')]}"
        if part.endswith(("attn_q", "attn_k")):  # pairs that rotate together are neighbours here
            order = torch.arange(len(data)).view(-1, 4, 2).transpose(1, 2).flatten()
            data = data[order]
        assert torch.equal(data, expected[f"{name}.weight"]), tensor.name
        seen.add(f"{name}.weight")
    assert seen == set(expected) - {"d2t"}


def test_the_command_writes_for_the_model_that_was_tuned(served, tmp_path, capsys) -> None:
    model, draft_model = served
    model.save_pretrained(tmp_path / "model")
    draft_model.save_pretrained(tmp_path / "run")
    words = ["decode", "export", str(tmp_path / "run"), "--to", "vllm", "--out"]
    words.append(str(tmp_path / "head"))
    assert main(words) == 2
    assert "for which model it was tuned" in capsys.readouterr().err


def test_what_engines_cannot_serve_is_refused(make_model, served, small, tmp_path) -> None:
    linear = make_linear()
    shallow = make_model(num_hidden_layers=4)
    linear.meta["model"] = adapt(shallow).identity()
    with pytest.raises(UserError, match="three different ones"):
        export_head(DraftModel(linear, make_head(shallow)), shallow, "vllm", tmp_path / "out")
    model, draft_model = served
    with pytest.raises(UserError, match="This draft head"):
        export_head(draft_model, small, "vllm", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_head(draft_model, model, "vllm", tmp_path / "out")
