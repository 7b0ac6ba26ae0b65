"""Products by the faster library: as exact, only where it is faster, and only as long as asked."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from deepenough.nn import products
from deepenough.nn.products import fast_products, is_faster


@pytest.fixture(autouse=True)
def asked_anew():
    is_faster.cache_clear()
    yield
    is_faster.cache_clear()


def precision():
    return getattr(products._settings(), "fp32_precision", None)


has_a_choice = pytest.mark.skipif(products._settings() is None, reason="torch is too old to choose")


def test_products_and_gradients_are_those_of_float64_to_rounding():
    left = torch.randn(64, 300, requires_grad=True)
    right = torch.randn(300, 50, requires_grad=True)
    exact = left.double() @ right.double()
    expected = torch.autograd.grad(exact.square().sum(), (left, right))
    with fast_products():
        found = left @ right
        gradients = torch.autograd.grad(found.square().sum(), (left, right))
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradients, expected, atol=1e-2, rtol=1e-5)


@has_a_choice
def test_the_setting_is_as_before_afterwards(monkeypatch):
    monkeypatch.setattr(products, "is_faster", lambda: True)
    before = precision()
    with pytest.raises(KeyError), fast_products():
        assert precision() == "bf16"
        raise KeyError
    assert precision() == before


@has_a_choice
def test_a_precision_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setattr(products, "is_faster", lambda: True)
    before = precision()
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    with fast_products():
        assert precision() == "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("has", [set(), {"avx512f"}, {"AuthenticAMD", "avx512f", "amx_tile"}])
def test_other_processors_keep_what_torch_chose(monkeypatch, has):
    monkeypatch.setattr(products, "processor_has", lambda *flags: set(flags) <= has)
    assert not is_faster()
    before = precision()
    with fast_products():
        assert precision() == before


class Rounding(TorchFunctionMode):
    """Products as a processor makes them that does round to bfloat16 where it may."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.matmul and self.settings.fp32_precision == "bf16":
            args = [tensor.bfloat16().to(tensor.dtype) for tensor in args]
        return func(*args, **(kwargs or {}))


def test_a_processor_that_rounds_is_noticed(monkeypatch):
    settings = SimpleNamespace(fp32_precision="none")
    monkeypatch.setattr(products, "_settings", lambda: settings)
    monkeypatch.setattr(products, "processor_has", lambda *flags: "amx_tile" not in flags)
    assert is_faster()
    is_faster.cache_clear()
    with Rounding(settings):
        assert not is_faster()
    assert settings.fp32_precision == "none"


@pytest.mark.parametrize("tokens", [16, 300])
def test_attention_is_the_same_whichever_way_it_is_made(monkeypatch, tokens):
    monkeypatch.setattr(products, "is_faster", lambda: True)
    query, key, value = torch.randn(3, 2, 2, tokens, 8).requires_grad_().unbind()
    mask = torch.randn(tokens, tokens)

    def attend():
        found = F.scaled_dot_product_attention(query, key=key, value=value, attn_mask=mask)
        return found, *torch.autograd.grad(found.square().sum(), (query, key, value))

    expected = attend()
    with fast_products():
        found = attend()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
