"""`deepenough decode export`: a draft head in the form that an inference engine loads.

`vllm` is the layout of the `speculators` library, `sglang` the flat one of the EAGLE-3 authors. In
both, layer `i` stands for its input. In the GGUF file of `llama.cpp`, `d2t` holds the tokens
themselves, and the channels of queries and keys that rotate together are neighbours. Where a layout
leaves it open, embeddings are the model's own.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepenough.artifacts import atomic_path, save_tensors, write_text
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.eagle3 import NUM_STEPS, Eagle3Head
from deepenough.decoding.native_weights import MATRICES
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import stored_gguf

_GGUF_FILE = "eagle3.gguf"
#: Norms of the layer in a GGUF file, where its matrices have the names of a model's.
_GGUF_NORMS = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
}


def export_head(
    draft_model: DraftModel, model: Any, to: str, out: Path, gguf: str | None = None
) -> Path:
    """Write a draft head for an engine into the folder `out`, and return what to give to it.

    `to` is "vllm", "sglang" or "llama.cpp"; `gguf` the model's own GGUF file, whose tokenizer
    llama.cpp needs, by default the one that the model comes from.
    """
    adapter = adapt(model)
    adapter.check_made_for(draft_model.linear_drafter.made_for, "This draft head")
    head = draft_model.head
    if len(set(head.config.layers)) < 3:
        raise UserError(
            f"The head reads the layers {list(head.config.layers)}, and engines read three "
            "different ones: models of 7 layers or more can be served with a head."
        )
    source = stored_gguf(model) if gguf is None else Path(gguf)
    if to == "llama.cpp" and (source is None or not source.is_file()):
        raise UserError(
            "llama.cpp needs the tokenizer of the GGUF file of the model that it will run: give "
            "that file with --gguf."
        )
    if out.exists():
        raise UserError(f"{out} exists already: give a folder that does not.")
    try:
        with atomic_path(out) as partial:
            partial.mkdir(parents=True)
            if to == "llama.cpp":
                _write_gguf(partial / _GGUF_FILE, head, model.config, str(source))
            else:
                _write_folder(partial, head, model, to)
    except OSError as error:
        raise UserError(f"The head cannot be written to {out}: {error}.") from error
    return out / _GGUF_FILE if to == "llama.cpp" else out


def public_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Return the head's tensors in the public form, the unit of its inputs within `fc`."""
    tensors = {name: each.detach().cpu() for name, each in head.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] / tensors.pop("input_scale")
    return tensors


def _write_folder(folder: Path, head: Eagle3Head, model: Any, to: str) -> None:
    """Write config.json and model.safetensors in one of the two public layouts."""
    tensors, layers = public_tensors(head), list(head.config.layers)
    own = _llama_config(head, model)
    shared: dict[str, Any] = {
        "draft_vocab_size": head.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": False,
        "torch_dtype": "float32",
    }
    tensors["t2d"] = torch.zeros(own["vocab_size"], dtype=torch.bool)
    tensors["t2d"][head.tokens_S.cpu()] = True
    if to == "vllm":
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        method = {"proposal_type": "greedy", "speculative_tokens": NUM_STEPS}
        verifier: dict[str, Any] = {"name_or_path": str(model.config._name_or_path)}
        config = shared | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": verifier | {"architectures": [type(model).__name__]},
            },
            "transformer_layer_config": own,
        }
    else:
        embedding: Any = model.get_input_embeddings()
        tensors["embed_tokens.weight"] = embedding.weight.detach().float()
        # SGLang counts the outputs of layers.
        counted = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
        config = own | shared | {"architectures": ["LlamaForCausalLMEagle3"]}
        config |= {"eagle_config": counted | {"use_aux_hidden_state": True}}
    save_tensors(folder / "model.safetensors", tensors)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _llama_config(head: Eagle3Head, model: Any) -> dict[str, Any]:
    """Return the config of a Llama of the head's one layer."""
    text, sizes = model.config.get_text_config(), asdict(head.config)
    del sizes["layers"], sizes["draft_vocab_size"]
    return sizes | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 4096,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
    }


def _write_gguf(path: Path, head: Eagle3Head, model_config: Any, source: str) -> None:
    """Write the head as a GGUF file of the architecture eagle3."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    own, text = head.config, model_config.get_text_config()
    writer = GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(getattr(text, "max_position_embeddings", None) or 4096)
    writer.add_embedding_length(own.hidden_size)
    writer.add_feed_forward_length(own.intermediate_size)
    writer.add_head_count(own.num_attention_heads)
    writer.add_head_count_kv(own.num_key_value_heads)
    writer.add_key_length(own.head_dim)
    writer.add_value_length(own.head_dim)
    writer.add_rope_dimension_count(own.head_dim)
    writer.add_rope_freq_base(own.rope_theta)
    writer.add_layer_norm_rms_eps(own.rms_norm_eps)
    writer.add_vocab_size(text.vocab_size)
    writer.add_array("eagle3.target_layers", list(own.layers))
    writer.add_uint32("eagle3.target_hidden_size", own.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", False)
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            sub = inner[-1] if inner and kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for name, tensor in public_tensors(head).items():
        part, _, _ = name.removeprefix("midlayer.").rpartition(".")
        if name.startswith("midlayer."):
            if part.endswith(("q_proj", "k_proj")):
                halves = tensor.view(-1, 2, own.head_dim // 2, tensor.shape[1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            given = (MATRICES | _GGUF_NORMS)[part]
            writer.add_tensor(f"blk.0.{given}.weight", tensor.float().numpy())
        elif name != "d2t":
            given = {"norm": "output_norm", "lm_head": "output", "fc": "fc"}[part]
            writer.add_tensor(f"{given}.weight", tensor.float().numpy())
    tokens = head.tokens_S.cpu().numpy().astype(np.int64)
    writer.add_tensor("d2t", tokens, raw_dtype=GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
