"""The native backend: every kernel equals its formula, every model its own `generate`."""

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from deepenough import UserError
from deepenough.decoding import native_backend
from deepenough.decoding.api import speculate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.native_backend import NativeEngine
from deepenough.decoding.native_weights import (
    FORMATS,
    LIBRARY,
    NativeConfig,
    NativeWeights,
    as_stored,
    kernel_names,
)
from deepenough.hf.adapter import adapt

pytestmark = pytest.mark.skipif(
    native_backend.load_library() is None, reason="compiled where there is a C++ compiler"
)
KERNELS = ("portable", "avx2", "avx512", "avx512vnni")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(params=KERNELS)
def kernels(request) -> str:
    """Every set of kernels that this CPU can run."""
    if request.param not in kernel_names():
        pytest.skip("this CPU has no such instructions")
    return request.param


def make(config_class, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES | options))
    return model.eval()


def weights(name: str, rows: int, cols: int, generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as it is stored, and the floats that it stands for."""
    full = generator.standard_normal((rows, cols)).astype(np.float32)
    if name == "F32":
        return full, full
    if name == "F16":
        return full.astype(np.float16), full.astype(np.float16).astype(np.float32)
    kind = getattr(GGMLQuantizationType, name)
    stored = np.ascontiguousarray(quantize(full, kind))
    return stored, dequantize(stored, kind)


def product(
    kernels: str, exact: bool, name: str, stored: np.ndarray, rows: int, values: np.ndarray
) -> np.ndarray:
    """Return the products of rows of activations with a stored matrix, in compiled code."""
    config = NativeConfig((ctypes.c_int * 8)(1, *[values.shape[1]] * 7), 0.0, 1.0, exact, False)
    library = native_backend.load_library()
    made = NativeWeights(library.de_model_new(ctypes.byref(config), kernels.encode(), 2))
    made.call(
        "de_model_matrix", 0, 0, FORMATS[name], stored.ctypes.data, rows, values.shape[1], None
    )
    found = np.full((len(values), rows), np.nan, np.float32)
    made.call("de_multiply", 0, 0, values.ctypes.data, len(values), found.ctypes.data)
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("rows", "cols", "count"), [(16, 32, 1), (70, 96, 2), (33, 64, 3), (48, 160, 9)]
)
def test_products_are_those_of_the_formula(kernels, name, exact, rows, cols, count) -> None:
    """To a rounding of fp32, in units of what the product of the sizes would be."""
    generator = np.random.default_rng(rows)
    stored, floats = weights(name, rows, cols, generator)
    spread = generator.choice([1e-4, 1.0, 50.0], cols)
    values = (generator.standard_normal((count, cols)) * spread).astype(np.float32)
    found = product(kernels, exact, name, stored, rows, values)
    expected = values.astype(np.float64) @ floats.astype(np.float64).T
    size = np.abs(values).astype(np.float64) @ np.abs(floats).astype(np.float64).T
    assert np.abs(found - expected).max() <= 3e-7 * size.max()


def test_extreme_activations_are_exact(kernels) -> None:
    """Zeros, one large number among small ones, and the largest digits of both signs."""
    values = np.zeros((4, 64), np.float32)
    values[1, 3] = 1e30
    values[2] = np.where(np.arange(64) % 2, 127.0, -128.0)
    values[3, :32] = np.linspace(-1, 1, 32)
    stored, floats = weights("Q4_1", 16, 64, np.random.default_rng(0))
    found = product(kernels, True, "Q4_1", stored, 16, values)
    expected = values.astype(np.float64) @ floats.astype(np.float64).T
    assert np.array_equal(found[0], np.zeros(16))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5)


def test_the_smallest_form_that_holds_the_weights_exactly() -> None:
    random = torch.randn(8, 8)
    assert as_stored(random).format == "F32"
    assert as_stored(random.bfloat16().float()).format == "BF16"
    assert as_stored(random.half().float()).format == "F16"


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24}),
        (LlamaConfig, {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}),
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {}),
        (Qwen3Config, {"head_dim": 32}),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_generates_what_the_model_generates(kernels, config_class, options, padded) -> None:
    model = make(config_class, **options)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    engine = NativeEngine(adapt(model), kernels=kernels, threads=2)
    fast = speculate(model, backend="native")
    fast.engine_and_state = engine, fast.engine_and_state[1]
    ids = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = mask[2, :9] = 0
    given = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **given)
    output = fast.generate(ids, **given, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.backend == "native"


def test_a_pass_knows_the_best_tokens(kernels) -> None:
    """They are the first of the largest logits, whichever threads have found them."""
    model = make(LlamaConfig)
    with torch.no_grad():
        model.lm_head.weight[70:] = model.lm_head.weight[:27]  # ties
    engine = NativeEngine(adapt(model), kernels=kernels, threads=2)
    for seed in range(20):
        ids = torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(seed))
        engine.prefill(ids[:, :4], None, 8)
        step = engine.start_step(ids[:, 4:])
        logits = engine.head(engine.norm(engine.run_through(step, step.hidden)))
        first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(engine.best(logits), first)
        assert engine.best(logits.clone()) is None


@pytest.mark.parametrize("length", [3, 40, 1100, 2300])
def test_long_contexts_are_attended_to_in_pieces(kernels, length) -> None:
    model = make(LlamaConfig, num_hidden_layers=1)
    engine = NativeEngine(adapt(model), kernels=kernels, threads=3)
    ids = torch.randint(2, 97, (2, length + 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(ids).logits
        state = engine.prefill(ids[:, :length], None, length + 8)
        torch.testing.assert_close(
            engine.head(state), expected[:, length - 1], atol=2e-4, rtol=1e-4
        )
        for start, count in ((length, 1), (length + 1, 3), (length + 4, 2)):
            step = engine.start_step(ids[:, start : start + count])
            hidden = engine.run_layers(step, step.hidden, 0, 1)
            found = engine.head(engine.norm(hidden))
            own = expected[:, start : start + count]
            torch.testing.assert_close(found, own, atol=2e-4, rtol=1e-4)
            engine.keep([count, count])


@pytest.mark.parametrize("length", [5, 1100])
def test_keys_and_values_may_be_kept_in_bf16(kernels, length) -> None:
    """Rounded to 8 bits of precision: logits move by about as much, and no more."""
    model = make(LlamaConfig, num_hidden_layers=1)
    ids = torch.randint(2, 97, (2, length + 1), generator=torch.Generator().manual_seed(3))
    found = []
    for rounded in (False, True):
        engine = NativeEngine(adapt(model), kernels=kernels, threads=2, cache_bf16=rounded)
        engine.prefill(ids[:, :length], None, length + 8)
        step = engine.start_step(ids[:, length:])
        found.append(engine.head(engine.norm(engine.run_layers(step, step.hidden, 0, 1))))
    difference = float((found[0] - found[1]).abs().max())
    assert 0.0 < difference < 2**-6 * float(found[0].abs().max())


def test_what_does_not_fit_is_left_to_the_other_backends() -> None:
    model = make(LlamaConfig, hidden_act="gelu")
    assert make_engine(model).backend == "torch"
    assert make_engine(make(LlamaConfig).double()).backend == "torch"
    with pytest.raises(UserError, match="leave the backend open"):
        make_engine(model, "native")
    with pytest.raises(UserError, match="choose one of native, torch, general"):
        make_engine(model, "fast")


def test_without_a_compiled_library_torch_is_used(monkeypatch) -> None:
    missing = LIBRARY.with_name("missing.so")
    monkeypatch.setattr("deepenough.decoding.native_weights.LIBRARY", missing)
    monkeypatch.setattr(native_backend, "load_library", native_backend.load_library.__wrapped__)
    assert make_engine(make(LlamaConfig)).backend == "torch"


def test_a_library_of_another_version_is_not_used(monkeypatch, caplog) -> None:
    monkeypatch.setattr("deepenough.decoding.native_weights.INTERFACE", 1)
    assert native_backend.load_library.__wrapped__() is None
    assert "compile it anew" in caplog.text


def test_more_threads_than_cores_change_nothing() -> None:
    """Threads that come late to a phase must neither repeat its tasks nor be waited for."""
    model = make(LlamaConfig)
    engine = NativeEngine(adapt(model), threads=6)
    ids = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(4))
    state = engine.prefill(ids, None, 32)
    expected = None
    for _ in range(300):
        step = engine.start_step(ids[:, :2])
        found = engine.run_layers(step, step.hidden, 0, engine.num_layers)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    assert torch.equal(engine.head(state), engine.head(state))


def test_tokens_outside_the_vocabulary_and_passes_too_long_are_refused() -> None:
    engine = NativeEngine(adapt(make(LlamaConfig)))
    for token in (-1, 97):
        with pytest.raises(UserError, match="not in the vocabulary"):
            engine.prefill(torch.tensor([[5, token]]), None, 8)
    step = engine.start_step(torch.ones(1, 2, dtype=torch.long))
    step.hidden = torch.zeros(1, 20000, 64)
    with pytest.raises(UserError, match="tokens in one pass"):
        engine.prefill(torch.ones(1, 2, dtype=torch.long), None, 20000)
        engine.run_layers(step, step.hidden, 0, 1)


def test_long_prompts_are_read_in_parts() -> None:
    model = make(LlamaConfig)
    engine = NativeEngine(adapt(model))
    ids = torch.randint(2, 97, (3, 3000), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found, expected = engine.head(engine.prefill(ids, None, 3001)), model(ids).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
