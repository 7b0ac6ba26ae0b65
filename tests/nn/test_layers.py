"""Dropout against a Bernoulli draw, the linear map against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deepenough.nn import layers
from deepenough.nn.layers import Dropout, Linear, dropout_mask

WIDE, FEW = layers._MIN_WIDTH, layers._FEW_ROWS


@pytest.mark.parametrize("probability", [0.1, 0.37, 0.5, 0.9])
def test_mask_is_a_bernoulli_draw(probability):
    torch.manual_seed(0)
    mask = dropout_mask(torch.Size([400, 500]), probability, torch.float64)
    count = mask.numel()
    dropped = round(probability * 65536) / 65536
    assert mask.unique().tolist() == [0.0, 65536 / (65536 - round(probability * 65536))]
    # Five standard errors of each estimate.
    share = float((mask == 0).double().mean())
    assert share == pytest.approx(dropped, abs=5 * math.sqrt(dropped * (1 - dropped) / count))
    variance = dropped / (1 - dropped)
    assert float(mask.mean()) == pytest.approx(1.0, abs=5 * math.sqrt(variance / count))
    fourth = ((mask - 1.0) ** 4).mean() - variance**2
    error = math.sqrt(max(float(fourth), 1e-6) / count)
    assert float(mask.var()) == pytest.approx(variance, abs=5 * error)


def test_elements_of_one_random_word_are_independent():
    """Four elements share a 64-bit draw: none must tell anything about its neighbour."""
    torch.manual_seed(1)
    kept = dropout_mask(torch.Size([50_000, 4]), 0.5, torch.float64) > 0
    correlation = torch.corrcoef(kept.double().T) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / math.sqrt(50_000)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3, 7), (0, 5)])
def test_any_shape(shape):
    assert dropout_mask(torch.Size(shape), 0.5, torch.float32).shape == shape


def test_scale_is_exact_and_follows_the_dtype():
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        mask = dropout_mask(torch.Size([1000]), 0.25, dtype)
        assert mask.dtype == dtype
        assert mask.unique().tolist() == [0.0, torch.tensor(4 / 3, dtype=dtype).item()]


@pytest.mark.parametrize("probability", [1 - 2**-16, 1 - 2**-30])
def test_the_highest_probability_keeps_one_of_the_65536_draws(probability):
    torch.manual_seed(3)
    kept = dropout_mask(torch.Size([64 * 65536]), probability, torch.float32) > 0
    assert 64 - 5 * 8 < int(kept.sum()) < 64 + 5 * 8


def test_identity_in_evaluation_and_without_dropout():
    x = torch.randn(3, 4)
    assert Dropout(0.0)(x) is x
    assert Dropout(0.5).eval()(x) is x


def test_seed_repeats_the_draw():
    x = torch.ones(1000)
    module = Dropout(0.3)
    torch.manual_seed(4)
    first, second = module(x), module(x)
    torch.manual_seed(4)
    assert torch.equal(module(x), first)
    assert torch.equal(module(x), second)
    assert not torch.equal(first, second)


def test_gradient_is_the_mask():
    torch.manual_seed(5)
    x = torch.full((200,), 2.0, requires_grad=True)
    y = Dropout(0.4)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / 2.0)


def maps(bias: bool) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours, theirs = Linear(WIDE, 24, bias=bias), nn.Linear(WIDE, 24, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (16,), (4, 4), (2, 3, 8), (48,), (49,), (5, 20)])
def test_equal_to_torchs(shape: tuple[int, ...], bias: bool) -> None:
    ours, theirs = maps(bias)
    rows = torch.randn(*shape, WIDE)
    with torch.no_grad():
        made = ours(rows)
        torch.testing.assert_close(made, theirs(rows), rtol=1e-4, atol=1e-5)
    assert made.is_contiguous()


def test_few_rows_go_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def products() -> int:
        calls.clear()
        ours(rows)
        return len(calls)

    calls: list[int] = []
    monkeypatch.setattr(layers.torch, "mm", lambda a, b: calls.append(1) or a.matmul(b))
    ours, _ = maps(bias=False)
    rows = torch.randn(FEW[0], WIDE)
    assert products() == 0, "a training keeps to torch's own map"
    with torch.no_grad():
        assert products() == 1
        rows = torch.randn(FEW[0] - 1, WIDE)
        assert products() == 0
        ours, rows = Linear(8, 4, bias=False), torch.randn(FEW[0], 8)
        assert products() == 0


def test_it_learns_as_torchs_does() -> None:
    ours, theirs = maps(bias=True)
    rows = torch.randn(FEW[0], WIDE)
    for module in (ours, theirs):
        module(rows).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
