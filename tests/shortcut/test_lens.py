"""Scores of predictions: by hand, against the definitions, and at the edges."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.shortcut.lens import Reference


def test_by_hand():
    """The last layer says 1/2, 1/4, 1/4; the early one 1/4, 5/8, 1/8."""
    last = torch.tensor([[0.5, 0.25, 0.25]]).log()
    early = torch.tensor([[0.25, 0.625, 0.125]]).log() + 3.0  # logits are free up to a constant
    found = Reference(last).score(early)
    assert found.gap.item() == pytest.approx(0.375)
    assert found.rank.item() in (1, 2)  # the last layer's second and third are equal
    assert found.surprisal.item() == pytest.approx(math.log(4))
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.4) + 0.25 * math.log(2)
    assert found.kl.item() == pytest.approx(kl)


@given(st.integers(0, 10_000), st.sampled_from([2, 11, 255, 256, 257, 300, 1000]))
def test_fast_equals_definition(score_ref: Any, seed: int, width: int):
    generator = torch.Generator().manual_seed(seed)
    last = torch.randn(20, width, generator=generator) * 3
    early = last + torch.randn(20, width, generator=generator)
    found, expected = Reference(last).score(early), score_ref(early, last)
    assert torch.equal(found.rank, expected.rank)
    for name in ("gap", "surprisal", "kl"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name).float(), rtol=1e-4, atol=1e-5
        )


def test_the_last_layer_agrees_with_itself():
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0))
    reference = Reference(logits)
    own, scored = reference.scores(), reference.score(logits)
    assert own.rank.tolist() == [0] * 9
    assert own.kl.tolist() == [0.0] * 9
    assert torch.equal(own.rank, scored.rank)
    for name in ("gap", "surprisal", "kl"):
        torch.testing.assert_close(getattr(own, name), getattr(scored, name), rtol=1e-4, atol=1e-5)


def test_words_that_are_ruled_out():
    """A head may forbid words by a logit of -inf: they cost nothing where both forbid them."""
    logits = torch.zeros(1, 4)
    logits[0, 3] = -torch.inf
    found = Reference(logits).scores()
    assert found.surprisal.item() == pytest.approx(math.log(3))
    early = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    kl = sum(math.log((1 / 3) / q) / 3 for q in (0.5, 0.25, 0.25))
    assert Reference(logits).score(early).kl.item() == pytest.approx(kl, rel=1e-5)
