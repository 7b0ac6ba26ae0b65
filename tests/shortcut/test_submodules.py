"""Parts of blocks replaced by linear maps: exact where they are linear, absent where replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
)

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import (
    LayerCounter,
    OutputForms,
    start_at,
)
from deepenough.par.modeling import ParConfig, ParForCausalLM
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.submodules import (
    SOURCE_PLACES,
    Replacement,
    Submodules,
    SubmoduleStatistics,
    parts_of,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
WIDE = SHAPE | {"intermediate_size": 24}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE, num_key_value_heads=1)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**WIDE)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=24, word_embed_proj_dim=16)),
    "bert": lambda: BertForMaskedLM(BertConfig(**WIDE)),
    "albert": lambda: AlbertForMaskedLM(AlbertConfig(**WIDE, embedding_size=8)),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(
            **WIDE, pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2
        )
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SHAPE)),  # attention beside feed-forward
    "falcon-40b": lambda: FalconForCausalLM(
        FalconConfig(**SHAPE, new_decoder_architecture=True, num_kv_heads=1)
    ),
    "falcon-rw": lambda: FalconForCausalLM(
        FalconConfig(**SHAPE, parallel_attn=False, multi_query=False, alibi=True)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**WIDE, num_key_value_heads=1, head_dim=8)),
}


def make(name: str) -> Adapter:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # of a size at which every part matters
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return adapt(model)


@pytest.fixture(params=MODELS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return make(request.param)


def batch(num_texts: int = 4, length: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and a mask; the second text is shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (num_texts, length), generator=generator)
    mask = torch.ones_like(ids)
    if num_texts > 1 and length > 2:
        mask[1, -2:] = 0
    return ids, mask


def fit(
    adapter: Adapter,
    num_texts: int = 40,
    length: int = 6,
    affine: bool = False,
    ridge: float = 0.0,
) -> Submodules:
    statistics = SubmoduleStatistics(adapter)
    ids, _ = batch(num_texts, length)
    row, position = torch.ones_like(ids).nonzero().unbind(1)
    with statistics.observing(row, position):
        adapter.states(ids, torch.ones_like(ids))
    return Submodules.from_statistics(statistics, adapter, affine, ridge)


def test_a_pass_from_a_stored_state_is_the_pass(adapter: Adapter) -> None:
    ids, mask = batch()
    states = adapter.states(ids, mask)
    counter, forms = LayerCounter(adapter), OutputForms(adapter)
    for layer in range(adapter.num_layers):
        with counter.counting(), start_at(counter, forms, layer, states[layer]):
            # Other tokens of the same shape: what comes before the layer has no influence.
            found = adapter.states(torch.full_like(ids, 7), mask)
        torch.testing.assert_close(found[-1], states[-1])
    torch.testing.assert_close(adapter.states(ids, mask)[-1], states[-1])


def test_a_pass_of_our_own_model_from_a_stored_state() -> None:
    """Its blocks return two tensors."""
    torch.manual_seed(0)
    config = ParConfig(vocab_size=50, d_model=16, num_heads=2, d_ff=24, pattern="ada", cutoffs=[])
    adapter = adapt(ParForCausalLM(config).eval())
    ids, _ = batch()
    states = adapter.states(ids)
    counter, forms = LayerCounter(adapter), OutputForms(adapter)
    for layer in range(adapter.num_layers):
        with counter.counting(), start_at(counter, forms, layer, states[layer]):
            torch.testing.assert_close(adapter.states(ids)[-1], states[-1])
    submodules = fit(adapter)
    assert submodules.kinds == ("attention", "feed_forward")
    alone = Replacement(submodules, adapter).without_attention(1, states[1][:, 3])
    with Replacement(submodules, adapter).replaced("attention", 1):
        torch.testing.assert_close(adapter.states(ids)[-1][:, 3], alone)


def test_layers_before_the_start_do_not_run() -> None:
    adapter = make("llama")
    ids, mask = batch()
    states = adapter.states(ids, mask)
    ran: list[int] = []
    for index, layer in enumerate(adapter.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    counter, forms = LayerCounter(adapter), OutputForms(adapter)
    ran.clear()
    with counter.counting(), start_at(counter, forms, 2, states[2]):
        adapter.states(ids, mask)
    assert ran == [2]


def test_replaced_from_the_end_on_is_the_model(adapter: Adapter) -> None:
    ids, mask = batch()
    submodules = fit(adapter)
    expected = adapter.states(ids, mask)
    replacement = Replacement(submodules, adapter)
    for kind in submodules.kinds:
        with replacement.replaced(kind, adapter.num_layers):
            assert torch.equal(adapter.states(ids, mask)[-1], expected[-1])
        with replacement.replaced(kind, 1):
            found = adapter.states(ids, mask)
        assert torch.equal(found[1], expected[1])
        assert not torch.equal(found[2], expected[2])
    for each, again in zip(expected, adapter.states(ids, mask), strict=True):
        assert torch.equal(each, again)


def test_attention_to_a_single_token_is_linear(adapter: Adapter) -> None:
    """A text of one token: attention is its value and output projections, so the fit is exact."""
    submodules = fit(adapter, num_texts=300, length=1, affine=True)
    ids, mask = batch(30, 1, seed=5)
    expected = adapter.states(ids, mask)[-1]
    with Replacement(submodules, adapter).replaced("attention", 0):
        found = adapter.states(ids, mask)[-1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_replaced_attention_mixes_no_tokens(adapter: Adapter) -> None:
    """So a token alone gives what it gives in its text, if it starts from the same state."""
    submodules = fit(adapter)
    ids, mask = batch()
    states = adapter.states(ids, mask)
    replacement = Replacement(submodules, adapter)
    for layer in range(adapter.num_layers):
        with replacement.replaced("attention", layer):
            whole = adapter.states(ids, mask)[-1]
        alone = replacement.without_attention(layer, states[layer][:, 3])
        torch.testing.assert_close(alone, whole[:, 3])


def test_a_linear_feed_forward_is_replaced_by_itself() -> None:
    adapter = make("gpt2")
    for layer in adapter.layers:
        layer.mlp.act = nn.Identity()
    submodules = fit(adapter, num_texts=100, affine=True)
    ids, mask = batch(seed=9)
    expected = adapter.states(ids, mask)[-1]
    with Replacement(submodules, adapter).replaced("feed_forward", 0):
        torch.testing.assert_close(adapter.states(ids, mask)[-1], expected, rtol=1e-3, atol=1e-3)


def test_linear_norms_are_replaced_by_themselves() -> None:
    class LinearNorm(nn.Linear):
        """A norm by its class's name, as the adapter looks for them, and linear."""

    adapter = make("llama")
    for layer in adapter.layers:
        layer.input_layernorm = LinearNorm(16, 16, bias=False)
        layer.post_attention_layernorm = LinearNorm(16, 16, bias=False)
    submodules = fit(adapter, num_texts=100)
    first = submodules.maps["norms", 0, 0].weight
    torch.testing.assert_close(
        first, adapter.layers[0].input_layernorm.weight.detach(), rtol=1e-3, atol=1e-3
    )
    ids, mask = batch(seed=9)
    expected = adapter.states(ids, mask)[-1]
    with Replacement(submodules, adapter).replaced("norms", 0):
        torch.testing.assert_close(adapter.states(ids, mask)[-1], expected, rtol=1e-3, atol=1e-3)


def test_what_is_replaced_is_not_computed() -> None:
    adapter = make("gpt2")
    submodules = fit(adapter)
    calls: list[str] = []
    for name, module in adapter.model.named_modules():
        if name.endswith(("c_attn", "c_fc")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    replacement = Replacement(submodules, adapter)
    calls.clear()
    with replacement.replaced("attention", 1):
        adapter.states(*batch())
    assert [name for name in calls if name.endswith("c_attn")] == ["transformer.h.0.attn.c_attn"]
    calls.clear()
    with replacement.replaced("feed_forward", 0):
        adapter.states(*batch())
    assert not any(name.endswith("c_fc") for name in calls)


def test_the_model_is_left_as_it_was_when_a_pass_fails() -> None:
    adapter = make("gpt2")
    submodules = fit(adapter)
    replacement = Replacement(submodules, adapter)
    with pytest.raises(RuntimeError, match="on the way"), replacement.replaced("attention", 0):
        raise RuntimeError("on the way")
    for module in adapter.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_six_parts_of_a_block_as_in_the_papers_code() -> None:
    """ln_1, attn, + , ln_2, mlp, +: each from what the one before returned, by `lstsq`."""
    adapter = make("gpt2")
    submodules = fit(adapter, num_texts=60)
    ids, _ = batch(60)
    states = adapter.states(ids, torch.ones_like(ids))
    for layer, block in enumerate(adapter.layers):
        places = [states[layer].flatten(0, 1)]
        normed = block.ln_1(states[layer])
        attended = block.attn(normed)[0]  # causal, whole texts
        between = states[layer] + attended
        added = block.mlp(block.ln_2(between))
        for each in (normed, attended, between, block.ln_2(between), added, between + added):
            places.append(each.detach().flatten(0, 1))
        torch.testing.assert_close(places[6], states[layer + 1].flatten(0, 1))
        for b, (kind, number) in SOURCE_PLACES.items():
            expected = torch.linalg.lstsq(places[b - 1].double(), places[b].double()).solution.T
            found = submodules.maps[kind, layer, number].weight.double()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_where_a_block_does_not_add_both_there_are_no_residuals() -> None:
    assert not any(place[0] == "residuals" for place in fit(make("bert")).maps)
    assert not any(place[0] == "residuals" for place in fit(make("gemma2")).maps)
    assert sum(place[0] == "residuals" for place in fit(make("llama")).maps) == 6


def test_sub_modules_are_fitted_with_the_maps_and_saved(
    plain: Any, texts: list[str], tmp_path: Path
) -> None:
    """In one pass over the text; the maps between layers stay what they are without."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=95, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config).eval()
    fitted = Shortcuts.fit(model, plain, texts, submodules=True, ridge=1e-6)
    fitted.save_pretrained(tmp_path)
    found = Shortcuts.from_pretrained(tmp_path)
    alone = Shortcuts.fit(model, plain, texts, ridge=1e-6)
    assert torch.equal(found.matrix(0, 2), alone.matrix(0, 2)) and alone.submodules is None
    parts = fitted.submodules
    assert parts is not None and found.submodules is not None
    assert found.submodules.texts == parts.texts == fitted.meta["data"]["fingerprint"]
    assert found.submodules.maps.keys() == parts.maps.keys() and len(parts.maps) == 12
    for place, part in parts.maps.items():
        assert torch.equal(found.submodules.maps[place].weight, part.weight)
    Replacement(found.submodules, adapt(model))
    del found.submodules.maps["norms", 1, 1]
    with pytest.raises(UserError, match="no map of"):
        Replacement(found.submodules, adapt(model))
    torch.nn.init.normal_(model.transformer.h[0].mlp.c_fc.weight)
    with pytest.raises(UserError, match="were made for"):
        Replacement(found.submodules, adapt(model))


def test_fits_are_least_squares(adapter: Adapter) -> None:
    """Against `lstsq` on the inputs and outputs of one part, caught by hooks of the test's own."""
    place = ("feed_forward", 1, 0)
    chain = parts_of(adapter)[place]
    x: list[Tensor] = []
    y: list[Tensor] = []
    handles = [
        chain[0].register_forward_hook(lambda _, args, __: x.append(args[0])),
        chain[-1].register_forward_hook(lambda _, __, output: y.append(output.clone())),
    ]
    submodules = fit(adapter)
    for handle in handles:
        handle.remove()
    use = 1 if len(x) > 1 else 0  # a shared layer leaves one entry per use
    read, returned = x[use].reshape(-1, 16).double(), y[use].reshape(-1, 16).double()
    # A norm without a bias leaves one direction empty but for rounding.
    expected = torch.linalg.lstsq(read, returned, rcond=1e-6, driver="gelsd").solution
    found = submodules.maps[place].weight.double().T
    # The maps may differ where nothing is read; what they give may not.
    torch.testing.assert_close(read @ found, read @ expected, rtol=1e-4, atol=1e-4)


def test_fits_of_other_weights_are_refused() -> None:
    adapter = make("gpt2")
    submodules = fit(adapter, affine=True)
    assert submodules.kinds == ("attention", "feed_forward", "norms")
    with torch.no_grad():
        adapter.layers[0].attn.c_attn.weight.add_(1)
    with pytest.raises(UserError, match="other weights"):
        Replacement(submodules, adapter)
