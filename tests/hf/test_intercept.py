"""Hooks, patches and stopped passes: what they see, and that nothing of them stays."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import (
    LayerCounter,
    OneDnnProducts,
    OutputForms,
    StopForward,
    first_call,
    fused_gelu,
    hidden_output,
    hooked,
    patched_forward,
    run_until_stopped,
    start_at,
    with_hidden_output,
)

IDS = torch.tensor([[1, 2, 3, 4]])


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=8, n_layer=3, n_head=2, vocab_size=20, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    return GPT2LMHeadModel(config).eval()


def albert() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AlbertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=20, embedding_size=8, max_position_embeddings=16,
    )  # fmt: skip
    return AlbertModel(config).eval()


@pytest.fixture(params=[gpt2, albert], ids=["gpt2", "albert"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return adapt(request.param())


def doubled(_: nn.Module, __: Any, output: Any) -> Any:
    return with_hidden_output(output, 2 * hidden_output(output))


def traces(model: nn.Module) -> list[Any]:
    """Whatever an interception leaves on modules."""
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
        for module in model.modules()
    ]


def test_everything_is_undone_also_after_an_error(adapter: Adapter) -> None:
    model, layer = adapter.model, adapter.layers[0]
    before = traces(model)
    with pytest.raises(KeyError), hooked(after=[(layer, doubled)]):
        raise KeyError
    with pytest.raises(KeyError), patched_forward({layer: lambda *_, **__: None}):
        raise KeyError
    own, inner = patched_forward({layer: layer.forward}), patched_forward({layer: print})
    with own, pytest.raises(KeyError), inner:  # a patch on a patch
        raise KeyError
    assert traces(model) == before


@torch.no_grad()
def test_a_hook_of_this_thread_does_not_see_another(adapter: Adapter) -> None:
    layer, found = adapter.layers[-1], {}

    def run(name: str) -> None:
        found[name] = adapter.states(IDS)[-1]

    run("plain")
    with hooked(after=[(layer, doubled)], this_thread=True):
        run("here")
        other = threading.Thread(target=run, args=("there",))
        other.start()
        other.join()
    with patched_forward({layer: lambda *_, **__: 1 / 0}, this_thread=True):
        other = threading.Thread(target=run, args=("beside a patch",))
        other.start()
        other.join()
    torch.testing.assert_close(found["there"], found["plain"])
    torch.testing.assert_close(found["beside a patch"], found["plain"])
    assert not torch.allclose(found["here"], found["plain"])


@torch.no_grad()
def test_the_first_call_serves_every_layer(adapter: Adapter) -> None:
    states = adapter.states(IDS)
    ran: list[nn.Module] = []
    watch = [(layer, lambda module, *_: ran.append(module)) for layer in set(adapter.layers)]
    with hooked(after=watch):
        call = first_call(adapter.layers[0], lambda: adapter.trunk(input_ids=IDS))
    assert not ran
    hidden = call.hidden
    for layer, expected in zip(adapter.layers, states[1:], strict=True):
        hidden = call.run(layer, hidden)
        torch.testing.assert_close(hidden, expected)


def test_a_pass_that_does_not_stop_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without reaching"):
        run_until_stopped(lambda: None)
    with pytest.raises(StopForward):
        raise StopForward


@torch.no_grad()
def test_a_pass_can_start_at_any_layer(adapter: Adapter) -> None:
    states = adapter.states(IDS)
    counter, forms = LayerCounter(adapter), OutputForms(adapter)
    for layer in range(adapter.num_layers):
        with counter.counting(), start_at(counter, forms, layer, states[layer]):
            found: Tensor = adapter.states(IDS)[-1]
        torch.testing.assert_close(found, states[-1])


@torch.no_grad()
def test_the_fused_activation_is_the_same_to_rounding() -> None:
    model = gpt2()
    expected = model(IDS).logits
    with fused_gelu(model):
        assert "forward" in vars(model.transformer.h[0].mlp.act)  # it does replace something
        torch.testing.assert_close(model(IDS).logits, expected)


def test_products_of_onednn_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepenough.hf.intercept._onednn_is_faster", lambda: True)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 5, 16), torch.randn(24, 16), torch.randn(24)
    calls: list[Any] = []
    real = torch.ops.mkldnn._linear_pointwise
    fake = SimpleNamespace(_linear_pointwise=lambda *args: calls.append(args) or real(*args))
    monkeypatch.setattr(torch.ops, "mkldnn", fake)
    for given in ((hidden, weight, bias), (hidden, weight), (hidden[:, 1], weight)):
        expected = nn.functional.linear(*given)
        with torch.no_grad(), OneDnnProducts():
            torch.testing.assert_close(nn.functional.linear(*given), expected)
    expected = torch.addmm(bias, hidden[0], weight.T)
    with torch.no_grad(), OneDnnProducts():
        torch.testing.assert_close(torch.addmm(bias, hidden[0], weight.T), expected)
        assert len(calls) == 4
        nn.functional.linear(hidden.double(), weight.double())
        nn.functional.linear(hidden[:0], weight)
    with OneDnnProducts():  # what is to be trained
        assert nn.functional.linear(hidden, weight.requires_grad_()).requires_grad
    assert len(calls) == 4
    monkeypatch.setattr("deepenough.hf.intercept.processor_has", lambda flag: flag != "amx_bf16")
    with torch.no_grad(), OneDnnProducts(in_half=True):
        rounded = nn.functional.linear(*(x.bfloat16() for x in (hidden, weight, bias))).float()
        assert torch.equal(nn.functional.linear(hidden, weight, bias), rounded)
