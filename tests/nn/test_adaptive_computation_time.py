"""Adaptive Computation Time against its equations, and on a case worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.nn.layers import EPSILON, act_halting

HALT = st.floats(0.001, 0.999)


def logits_of(*halts: float) -> torch.Tensor:
    return torch.tensor([halts], dtype=torch.float64).logit()


def act_halting_ref(halts: list[float]) -> tuple[list[float], int]:
    """Return the weights and number of passes of one example, straight from the equations."""
    weights: list[float] = []
    for n, halt in enumerate(halts, start=1):
        if sum(weights) + halt >= 1.0 - EPSILON or n == len(halts):
            weights.append(1.0 - sum(weights))
            return weights + [0.0] * (len(halts) - n), n
        weights.append(halt)
    raise ValueError("there is no pass to halt at")


def test_a_case_worked_by_hand() -> None:
    # 0.3 + 0.5 leaves 0.2 for the third pass, whose own 0.6 would exceed it.
    result = act_halting(logits_of(0.3, 0.5, 0.6, 0.9))
    assert result.weights[0].tolist() == pytest.approx([0.3, 0.5, 0.2, 0.0])
    assert result.passes.tolist() == [3]
    assert result.cost.tolist() == pytest.approx([3.2])


def test_the_last_pass_takes_what_is_left() -> None:
    result = act_halting(logits_of(0.1, 0.1, 0.1))
    assert result.weights[0].tolist() == pytest.approx([0.1, 0.1, 0.8])
    assert result.passes.tolist() == [3]


@given(st.lists(HALT, min_size=1, max_size=8))
def test_equal_to_the_equations(halts: list[float]) -> None:
    sums = [math.fsum(halts[: n + 1]) for n in range(len(halts))]
    if any(abs(total - 0.99) < 1e-9 for total in sums):
        return  # which side of the border rounding falls on is anybody's guess
    weights, passes = act_halting_ref(halts)
    result = act_halting(logits_of(*halts))
    assert result.weights[0].tolist() == pytest.approx(weights, abs=1e-9)
    assert result.passes.tolist() == [passes]
    assert float(result.weights.sum()) == pytest.approx(1.0)


def test_the_cost_pushes_towards_halting_earlier() -> None:
    logits = logits_of(0.3, 0.3, 0.9).requires_grad_()
    act_halting(logits).cost.sum().backward()
    assert logits.grad is not None
    # A higher lambda before the last pass leaves less, hence costs less; the last one is not used.
    assert (logits.grad[0, :2] < 0).all() and float(logits.grad[0, 2]) == 0.0
