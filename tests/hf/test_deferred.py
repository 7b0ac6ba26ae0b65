"""Deferred models: nothing is loaded until something asks for it, then it is the usual model."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from deepenough.decoding import native_backend
from deepenough.decoding.api import speculate
from deepenough.hf.adapter import Adapter, is_deferred
from deepenough.hf.deferred import gguf_tensors, load_deferred, safetensors_tensors
from deepenough.hf.layouts import LAYOUTS
from deepenough.hf.loading import load, stored_gguf

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
needs_library = pytest.mark.skipif(
    native_backend.load_library() is None, reason="compiled where there is a C++ compiler"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer_folder) -> dict[str, str]:
    """Saved models: tied or not, in three number formats, in one file or several."""
    found = {}
    for name, cls, dtype, options in (
        ("tied", LlamaConfig, "float32", {"tie_word_embeddings": True}),
        ("untied", LlamaConfig, "bfloat16", {"tie_word_embeddings": False}),
        ("biases", Qwen2Config, "float16", {}),
    ):
        torch.manual_seed(3)
        folder = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(cls(**SIZES, **options)).to(getattr(torch, dtype))
        model.generation_config.max_new_tokens = 7
        model.save_pretrained(folder, max_shard_size="90KB" if name == "untied" else "5GB")
        tokenizer_folder(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def tokenizer_folder():
    """Put a small tokenizer into a folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def write(folder: Path) -> None:
        words = {f"w{n}": n for n in range(320)}
        made = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)

    return write


NAMES = ("tied", "untied", "biases")


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_generates_without_its_modules_what_the_loaded_model_generates(folders, name) -> None:
    fast, usual = speculate(folders[name]), load(folders[name], "causal")[0]
    assert fast.config.to_dict() == usual.config.to_dict()
    assert fast.generation_config.to_dict() == usual.generation_config.to_dict()
    ids = torch.randint(2, 320, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    output = fast.eval().generate(ids, **options, return_dict_in_generate=True)
    assert is_deferred(fast) and fast.device == usual.device and fast.dtype == usual.dtype
    assert output.backend == "native"
    assert torch.equal(output.sequences, usual.generate(ids, **options))
    kinds = {"untied": {"BF16"}, "biases": {"F16"}, "tied": {"F32"}}
    assert fast.decoding_engine.native.formats == kinds[name]


def run_and_check_gradients(model) -> None:
    model.train()
    assert all(module.training for module in model.modules())


TRIGGERS = {
    "forward": lambda model: model(torch.tensor([[3, 4]])),
    "parameters": lambda model: list(model.parameters()),
    "state_dict": lambda model: model.state_dict(),
    "to": lambda model: model.to(torch.float32),
    "base_model": lambda model: model.base_model,
    "embeddings": lambda model: model.get_input_embeddings()(torch.tensor([3])),
    "modules": lambda model: list(model.modules()),
    "hooks": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None).remove(),
    "train": run_and_check_gradients,
    "print": repr,
    "size": lambda model: model.num_parameters(),
}


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_whoever_asks_for_modules_has_the_usual_model(folders, trigger) -> None:
    usual = load(folders["tied"], "causal")[0]
    model = load_deferred(folders["tied"])
    assert is_deferred(model)
    TRIGGERS[trigger](model)
    assert not is_deferred(model) and type(model) is type(usual)
    own, expected = model.state_dict(), usual.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)
    assert model.model.config is model.config
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.eval()(ids).logits, usual(ids).logits)


def test_a_replaced_head_stays_replaced(folders) -> None:
    model = load_deferred(folders["untied"])
    model.lm_head = torch.nn.Linear(64, 320, bias=False)
    expected = load(folders["untied"], "causal")[0]
    expected.lm_head = model.lm_head
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids).logits, expected(ids).logits)


@needs_library
def test_copies_share_one_loaded_model_and_are_decoded_as_changed(folders) -> None:
    """`speculate` copies the model it is given: both see what is loaded, and every change."""
    model = load_deferred(folders["tied"])
    fast = speculate(model)
    ids = torch.tensor([[5, 6, 7]])
    before = fast.generate(ids, max_new_tokens=8, do_sample=False)
    assert is_deferred(model) and is_deferred(fast)
    with torch.no_grad():
        fast.model.layers[0].mlp.up_proj.weight.mul_(-1.0)
    assert fast.model is model.model
    after = fast.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(after, model.generate(ids, max_new_tokens=8, do_sample=False))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_and_pickles_are_of_an_ordinary_model(folders, make) -> None:
    usual = load(folders["tied"], "causal")[0]
    made = make(load_deferred(folders["tied"]))
    made = pickle.loads(made) if isinstance(made, bytes) else made
    assert type(made) is type(usual) and not is_deferred(made)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(made(ids).logits, usual(ids).logits)


@needs_library
def test_other_backends_load_the_model(folders) -> None:
    fast = speculate(folders["tied"], backend="torch")
    output = fast.generate(
        torch.tensor([[5, 6]]), max_new_tokens=3, return_dict_in_generate=True, do_sample=False
    )
    assert output.backend == "torch" and not is_deferred(fast)


def test_saved_again_it_is_the_same(folders, tmp_path) -> None:
    load_deferred(folders["tied"]).save_pretrained(tmp_path)
    expected, found = (safetensors_tensors(Path(each)) for each in (folders["tied"], tmp_path))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert np.array_equal(tensor.read(), found[name].read())


def test_what_is_not_one_tensor_a_parameter_is_loaded_as_usual(folders, tmp_path) -> None:
    """A tensor too many, or too few, is for transformers to judge."""
    config = json.loads((Path(folders["tied"]) / "config.json").read_text())
    for path in Path(folders["tied"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert load_deferred(str(tmp_path)) is None
    assert load_deferred(folders["tied"]) is not None


def test_tensors_of_gguf_files_are_found(tmp_path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.name", "näme")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "", "déf"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_custom_alignment(64)
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((6, 32)).astype(np.float32)
    writer.add_tensor("first.weight", matrix)
    writer.add_tensor("second.weight", matrix.astype(np.float16)[:3])
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    found = gguf_tensors(path)
    assert found.keys() == {"first.weight", "second.weight"}
    assert found["second.weight"].shape == (3, 32)
    assert np.array_equal(found["first.weight"].read().view(np.float32).reshape(6, 32), matrix)
    assert np.array_equal(found["second.weight"].read(1, 1).view(np.float16), matrix[1].astype("e"))


MEMORY = """
import resource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
import deepenough, torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
before = peak()
fast = deepenough.speculate("smollm2")
ids = torch.arange(1000, 1000 + 384)[None]
options = {"min_new_tokens": 128, "max_new_tokens": 128, "do_sample": False}
output = fast.generate(ids, return_dict_in_generate=True, **options)
assert output.backend == "native" and output.sequences.shape == (1, 512)
print(peak() - before)
"""


@needs_library
def test_the_packaged_model_is_in_memory_once_and_as_stored() -> None:
    """97 MB of weights and 24 MB of keys and values: what comes on top is small."""
    command = [sys.executable, "-c", MEMORY]
    megabytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert megabytes <= 220  # 158 where it was written; a copy in float32 would add 540


@needs_library
def test_the_packaged_gguf_stands_for_the_weights_of_the_loaded_model() -> None:
    model = load("smollm2", "causal")[0]
    path = stored_gguf(model)
    listed = {tensor.name: tensor for tensor in GGUFReader(str(path)).tensors}
    found = gguf_tensors(path)
    assert found.keys() == listed.keys()
    for name, tensor in found.items():
        own = listed[name]
        assert (tensor.offset, tensor.format) == (own.data_offset, own.tensor_type.name)
        assert tensor.shape == tuple(map(int, reversed(own.shape)))
    native = native_backend.NativeModel(Adapter(model, LAYOUTS["llama"]))
    assert native.formats <= {"Q4_1", "Q8_0"}
