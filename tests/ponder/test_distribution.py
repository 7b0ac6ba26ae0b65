"""The halting distribution: by hand, against plain loops, and at the edges of floating point."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough import UserError
from deepenough.ponder.distribution import (
    expected_steps,
    expected_steps_ref,
    geometric_ref,
    halting_ref,
    kl,
    kl_ref,
    log_geometric,
    log_halting,
    log_survival,
)

LOGITS = st.lists(st.floats(-12, 12), min_size=1, max_size=14)
EXTREME = st.lists(st.floats(-300, 300), min_size=1, max_size=14)
TARGETS = st.floats(0.01, 0.99)


def lambdas(logits: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-z)) for z in logits]


def p_of(logits: list[float]) -> torch.Tensor:
    """`log p` of passes one more than there are logits: the last halts with certainty."""
    return log_halting(torch.tensor(logits, dtype=torch.float64), len(logits) + 1)


def test_by_hand():
    halves = torch.zeros(3)  # lambda 1/2 each
    assert log_halting(halves, 4).exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert expected_steps(log_halting(halves, 4)).item() == pytest.approx(15 / 8)
    assert log_survival(halves).exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8])


def test_last_pass_takes_the_remainder_of_the_prior():
    prior = log_geometric(0.2, 12).exp()
    assert prior[-1].item() == pytest.approx(0.8**11)  # 0.086, and not 0.018 of a rescaled one
    assert prior[2].item() == pytest.approx(0.2 * 0.8**2)


def test_one_pass_is_certain():
    assert log_halting(torch.empty(2, 0), 1).exp().tolist() == [[1.0], [1.0]]
    assert log_geometric(0.3, 1).tolist() == [0.0]


@settings(max_examples=40)
@given(LOGITS)
def test_mass_is_one_and_equals_the_loop(logits):
    p = p_of(logits).exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert p.tolist() == pytest.approx(halting_ref([*lambdas(logits), 0.3]), rel=1e-9, abs=1e-15)


@settings(max_examples=40)
@given(EXTREME)
def test_extreme_logits_stay_finite(logits):
    halt = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    log_p = log_halting(halt, len(logits) + 1)
    divergence = kl(log_p, log_geometric(0.2, len(logits) + 1))
    divergence.backward()
    assert log_p.isfinite().all() and divergence.isfinite() and halt.grad.isfinite().all()
    assert log_p.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=40)
@given(LOGITS, TARGETS)
def test_kl_is_that_of_the_model_from_the_prior(logits, target):
    num_passes = len(logits) + 1
    log_p = p_of(logits)
    prior = log_geometric(target, num_passes, like=log_p)
    value = kl(log_p, prior).item()
    expected = kl_ref(log_p.exp().tolist(), geometric_ref(target, num_passes))
    assert value >= -1e-12
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_kl_has_the_stated_direction():
    p, q = [0.7, 0.2, 0.1], [0.2, 0.2, 0.6]
    value = kl(torch.tensor(p).log(), torch.tensor(q).log()).item()
    assert value == pytest.approx(0.7 * math.log(3.5) + 0.1 * math.log(1 / 6))
    assert value != pytest.approx(kl_ref(q, p), rel=0.1)


@settings(max_examples=40)
@given(TARGETS, st.integers(1, 20))
def test_kl_is_zero_where_the_model_halts_as_the_prior(target, num_passes):
    logit = math.log(target) - math.log1p(-target)
    log_p = log_halting(torch.full((num_passes - 1,), logit, dtype=torch.float64), num_passes)
    assert kl(log_p, log_geometric(target, num_passes, like=log_p)).item() == pytest.approx(
        0, abs=1e-12
    )


@settings(max_examples=40)
@given(TARGETS, st.integers(1, 30))
def test_prior_equals_the_loop(target, num_passes):
    prior = log_geometric(target, num_passes, like=torch.empty(0, dtype=torch.float64)).exp()
    assert prior.tolist() == pytest.approx(geometric_ref(target, num_passes), rel=1e-9)
    assert prior.sum().item() == pytest.approx(1.0)


@settings(max_examples=40)
@given(LOGITS)
def test_expected_steps_equal_the_loop(logits):
    log_p = p_of(logits)
    assert expected_steps(log_p).item() == pytest.approx(expected_steps_ref(log_p.exp().tolist()))


@settings(max_examples=10)
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=6), TARGETS)
def test_gradients_equal_finite_differences(logits, target):
    def value(z: torch.Tensor) -> torch.Tensor:
        log_p = log_halting(z, z.shape[-1] + 1)
        prior = log_geometric(target, z.shape[-1] + 1, like=z)
        return kl(log_p, prior) + expected_steps(log_p)

    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, z)


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_impossible_targets_are_refused(target):
    with pytest.raises(UserError, match="halting target must lie between 0 and 1"):
        log_geometric(target, 4)


def test_missing_logits_are_noticed():
    with pytest.raises(ValueError, match="5 passes need 4"):
        log_halting(torch.zeros(2, 3), 5)
