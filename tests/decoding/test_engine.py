"""The engines: the model's own numbers, layers and weights, or a refusal."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    WhisperConfig,
    WhisperForCausalLM,
)

from deepenough import UserError
from deepenough.decoding import backends
from deepenough.decoding.api import speculate
from deepenough.decoding.general_backend import GeneralEngine
from deepenough.decoding.self_generated import decode_prompts
from deepenough.decoding.torch_backend import rms_norm

GREEDY = {"do_sample": False, "max_new_tokens": 16}


def test_own_layers_are_used_where_asked(small, prompts) -> None:
    expected = small.generate(**prompts(3), **GREEDY)
    fast = speculate(small, "none", backend="general")
    assert isinstance(fast.decoding_engine, GeneralEngine)
    assert torch.equal(fast.generate(**prompts(3), **GREEDY), expected)


def test_weights_are_not_held_twice(make_model, prompts) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = speculate(model, "none", backend="torch")
    layer = model.model.layers[0]
    together = layer.self_attn.q_proj.weight.untyped_storage()
    for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        assert projection.weight.untyped_storage().data_ptr() == together.data_ptr()
    assert fast.decoding_engine.layers[0].qkv_proj.weight.data_ptr() == together.data_ptr()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert fast.lm_head.weight is model.lm_head.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_is_that_of_torch(dtype) -> None:
    hidden, weight = 7 * torch.randn(5, 24, dtype=dtype), torch.randn(24, dtype=dtype)
    eps = torch.tensor(1e-3, dtype=dtype)
    torch.testing.assert_close(
        rms_norm(weight, eps, hidden), F.rms_norm(hidden, (24,), weight, float(eps))
    )


def test_changed_weights_are_noticed(make_model, prompts) -> None:
    model = make_model()
    fast = speculate(model, "none")
    model.double()  # new storage for every parameter
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(3.0)
    expected = model.generate(**prompts(1), **GREEDY)
    assert torch.equal(fast.generate(**prompts(1), **GREEDY), expected)


def test_flops_are_those_of_the_matrices(small, prompts) -> None:
    fast = speculate(small, "none")
    fast.generate(**prompts(1), max_new_tokens=1, do_sample=False)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48  # q, o; k, v; gate, up, down
    # The cost is counted with the new token in sight: 8 tokens.
    expected = 3 * (2 * layer + 4 * 8 * 32) + 2 * 40 * 32
    assert float(fast.trace.flops[0, 0]) == expected


def test_models_that_cannot_be_decoded_are_refused(make_model) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(UserError, match="does not generate"):
        speculate(BertForMaskedLM(BertConfig(**sizes)).eval())
    with pytest.raises(UserError, match="training mode"):
        speculate(make_model().train())
    with pytest.raises(UserError, match="adaptively already"):
        speculate(speculate(make_model()))


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_rotary_codes_that_change_with_length_are_left_to_the_model(
    make_model, prompts, scaling
) -> None:
    model = make_model(rope_parameters={"rope_theta": 10000.0, **scaling})
    fast = speculate(model, "none")
    assert isinstance(fast.decoding_engine, GeneralEngine) == (scaling["rope_type"] == "dynamic")
    expected = model.generate(**prompts(3), **GREEDY)
    assert torch.equal(fast.generate(**prompts(3), **GREEDY), expected)


def _bart():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 48, "max_position_embeddings": 64, "forced_eos_token_id": None}
    return BartForCausalLM(BartConfig(vocab_size=40, init_std=0.3, **sizes))


def _whisper():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 48, "max_target_positions": 64, "init_std": 0.3}
    return WhisperForCausalLM(WhisperConfig(vocab_size=40, **sizes, pad_token_id=0, bos_token_id=1))


@pytest.mark.parametrize("build", [_bart, _whisper])
def test_models_that_count_padding_do_as_generate_does(prompts, build) -> None:
    torch.manual_seed(0)
    model = build().eval()
    options = {**GREEDY, "eos_token_id": 7, "pad_token_id": 0}
    given = {name: value[2:] for name, value in prompts(5).items()}  # of one length
    expected = model.generate(**given, **options)
    for drafter in ("none", "lookup"):
        fast = speculate(model, drafter)
        assert torch.equal(fast.generate(**given, **options), expected)
        assert fast.decoding_engine.layered and not fast.decoding_engine.ignores_padding
        padded = model.generate(**prompts(3), **options)
        assert torch.equal(fast.generate(**prompts(3), **options), padded)


def test_models_that_take_no_positions_may_ignore_padding(prompts) -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(
        BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    ).eval()
    options = {**GREEDY, "pad_token_id": 0}
    expected = model.generate(**prompts(3), **options)
    assert torch.equal(speculate(model, "lookup").generate(**prompts(3), **options), expected)


def test_local_attention_is_right_beyond_its_window(prompts) -> None:
    torch.manual_seed(0)
    layers = [[["global", "local"], 1]]
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    sizes |= {"max_position_embeddings": 64, "attention_types": layers, "initializer_range": 0.3}
    model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=40, **sizes)).eval()
    options = {**GREEDY, "eos_token_id": 7, "pad_token_id": 0}
    for rows in (1, 3):
        expected = model.generate(**prompts(rows), **options)
        found = speculate(model, "lookup").generate(**prompts(rows), **options)
        assert torch.equal(found, expected)


def test_rotary_codes_end_where_they_change(make_model, prompts) -> None:
    """Tokens behind the switch would meet keys that were turned by other angles."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [7.0] * 4}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
    model = make_model(rope_parameters={"rope_theta": 10000.0, **scaling})
    fast = speculate(model, "lookup")
    for new, rows in ((9, 1), (9, 3), (2, 3)):
        options = {"do_sample": False, "max_new_tokens": new}
        expected = model.generate(**prompts(rows), **options)
        assert torch.equal(fast.generate(**prompts(rows), **options), expected)
    with pytest.raises(UserError, match="do not fit the model's 16"):
        plain = speculate(model, "lookup", backend="general")
        decode_prompts(plain.decoding_engine, [[5] * 7], 10)


@pytest.mark.parametrize(("switches", "limit"), [([16, 32], 16), ([], 64)])
def test_what_cannot_be_tried_is_decoded_up_to_its_first_switch(
    make_model, prompts, monkeypatch, switches, limit
) -> None:
    monkeypatch.setattr(backends, "make_twin", lambda model: (None, switches))
    monkeypatch.setattr(backends, "_trials", {})
    fast = speculate(make_model(), "lookup")
    assert fast.decoding_engine.max_length == limit
    assert fast.decoding_engine.ignores_padding  # tried on the model itself
    expected = make_model().generate(**prompts(3), do_sample=False, max_new_tokens=9)
    assert torch.equal(fast.generate(**prompts(3), do_sample=False, max_new_tokens=9), expected)


def test_a_model_whose_twin_differs_is_refused(make_model, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_trials", {})
    own = backends.Engine.head
    small = lambda adapter: adapter.model.config.vocab_size == 64  # noqa: E731 - a twin's
    monkeypatch.setattr(
        GeneralEngine, "head", lambda self, normed: own(self, normed) * (1 + small(self.adapter))
    )
    with pytest.raises(UserError, match=r"small model of the same kind.*the prompt are others"):
        backends.make_engine(make_model(vocab_size=80), "general")


def test_a_twin_is_tried_once(make_model, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_trials", {})
    made: list[Any] = []
    own = backends.make_twin
    monkeypatch.setattr(backends, "make_twin", lambda model: made.append(model) or own(model))
    for _ in range(2):
        speculate(make_model(), "none")
    speculate(make_model(rms_norm_eps=0.1), "none")
    assert len(made) == 2
