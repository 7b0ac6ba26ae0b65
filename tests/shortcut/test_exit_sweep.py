"""Early exit: a sweep worked by hand, the fast path against the loop, and what must always hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.shortcut.exit_sweep import (
    AGREEMENTS,
    LAMBDAS,
    fixed_exits,
    layers_saved,
    sweep,
    sweep_ref,
    thresholds,
)

# Two layers over the embeddings, four tokens, all at position 0: the threshold is 0.9 lambda + 0.1.
GAP = torch.tensor(
    [
        [0.05, 0.30, 0.60, 0.95],
        [0.50, 0.20, 0.70, 0.10],
        [0.90, 0.90, 0.90, 0.90],
    ]
)
AGREES = torch.tensor(
    [
        [False, False, True, True],
        [True, False, True, True],
        [True, True, True, True],
    ]
)
POSITION = torch.zeros(4, dtype=torch.long)


def test_a_sweep_by_hand():
    # lambda 0:   threshold 0.10: they leave at 1, 0, 0, 0; the second does not agree.
    # lambda 0.5: threshold 0.55: they leave at 2, 2, 0, 0; all agree.
    # lambda 1:   threshold 1.00: all run to the end.
    low, middle, high = sweep(GAP, AGREES, POSITION, 10.0, [0.0, 0.5, 1.0])
    assert (low.layers_mean, low.saved, low.agreement) == (0.25, 0.875, 0.75)
    assert (middle.layers_mean, middle.saved, middle.agreement) == (1.0, 0.5, 1.0)
    assert (high.layers_mean, high.saved, high.agreement) == (2.0, 0.0, 1.0)


def test_fixed_exits_and_layers_saved_by_hand():
    fixed = fixed_exits(AGREES)
    assert [point.agreement for point in fixed] == [0.5, 0.75, 1.0]
    assert [point.saved for point in fixed] == [1.0, 0.5, 0.0]
    points = sweep(GAP, AGREES, POSITION, 10.0, [0.0, 0.5, 1.0])
    rough, exact = layers_saved(points, fixed, [0.75, 0.9])
    assert (rough.saved, rough.lambda_, rough.fixed_layer_saved) == (0.875, 0.0, 0.5)
    assert (exact.saved, exact.lambda_, exact.fixed_layer_saved) == (0.5, 0.5, 0.0)


def test_thresholds_fall_along_the_text():
    found = thresholds(0.5, torch.tensor([0, 10, 1000]), 20.0)
    expected = [0.45 + 0.1, 0.45 + 0.1 * math.exp(-2.0), 0.45]
    assert found.tolist() == pytest.approx(expected)


def test_no_threshold_is_good_enough():
    """If even the strictest threshold errs too often, all layers are run and nothing is saved."""
    gap = torch.full((3, 5), 0.999)
    agrees = torch.tensor([[False] * 5, [False] * 5, [True] * 5])
    points = sweep(gap, agrees, torch.full((5,), 99), 10.0, [0.0, 0.5, 1.0])
    for row in layers_saved(points, fixed_exits(agrees)):
        assert (row.saved, row.lambda_, row.fixed_layer_saved) == (0.0, None, 0.0)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9))
def test_fast_equals_loop(seed: int, num_layers: int, num_tokens: int):
    generator = torch.Generator().manual_seed(seed)
    gap = torch.rand(num_layers + 1, num_tokens, generator=generator)
    agrees = torch.rand(num_layers + 1, num_tokens, generator=generator) < 0.6
    agrees[-1] = True
    position = torch.randint(0, 40, (num_tokens,), generator=generator)
    assert sweep(gap, agrees, position, 17.5) == sweep_ref(gap, agrees, position, 17.5)


@given(st.integers(0, 10_000))
def test_a_higher_threshold_saves_no_more(seed: int):
    generator = torch.Generator().manual_seed(seed)
    gap = torch.rand(5, 20, generator=generator)
    points = sweep(gap, gap > 0.3, torch.arange(20), 10.0)
    saved = [point.saved for point in points]
    assert saved == sorted(saved, reverse=True)
    assert all(0.0 <= share <= 1.0 for share in saved)


def test_the_sweep_has_35_thresholds_and_ends_with_running_all_layers():
    assert len(LAMBDAS) == 35
    assert LAMBDAS[0] == 0.0 and 1.0 in LAMBDAS
    assert sorted(set(LAMBDAS)) == list(LAMBDAS)
    sure = torch.ones(4, 6)
    agrees = torch.zeros(4, 6, dtype=torch.bool)
    agrees[-1] = True
    last = sweep(sure, agrees, torch.arange(6), 3.0)[-1]
    assert (last.saved, last.agreement) == (0.0, 1.0)
    assert AGREEMENTS == (0.90, 0.95, 0.99)
