"""Dropout against a Bernoulli draw."""

from __future__ import annotations

import math

import pytest
import torch

from deepenough.nn.layers import Dropout, dropout_mask


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
