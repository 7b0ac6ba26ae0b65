"""The loss: by hand, against a plain loop, and its kinds of task against torch's own losses."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough.ponder.distribution import log_halting
from deepenough.ponder.loss import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    answer_loss,
    fixed_loss,
    ponder_loss,
    ponder_loss_ref,
    problem_type,
)


def a_case(seed: int, passes: int = 5, examples: int = 4, labels: int = 3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(passes, examples, labels, generator=generator, dtype=torch.float64)
    halt = torch.randn(examples, passes - 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, labels, (examples,), generator=generator)
    return logits, halt, targets


def test_by_hand():
    # Two passes, one example: p = (1/4, 3/4); the answers give the right label 1/2 and 4/5.
    logits = torch.tensor([[[0.0, 0.0]], [[0.0, math.log(4)]]])
    log_p = torch.tensor([[0.25, 0.75]]).log()
    loss = ponder_loss(logits, log_p, torch.tensor([1]), SINGLE_LABEL, 0.5, kl_weight=2.0)
    task = 0.25 * math.log(2) + 0.75 * math.log(5 / 4)
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # from (1/2, 1/2)
    assert loss.task.item() == pytest.approx(task)
    assert loss.kl.item() == pytest.approx(divergence)
    assert loss.total.item() == pytest.approx(task + 2 * divergence)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.floats(0, 3))
def test_equals_the_loop(seed, target, beta):
    logits, halt, targets = a_case(seed)
    loss = ponder_loss(logits, log_halting(halt, 5), targets, SINGLE_LABEL, target, beta)
    lambdas = F.pad(halt.sigmoid(), (0, 1))
    expected = ponder_loss_ref(logits, lambdas, targets, target, beta)
    assert [term.item() for term in loss] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_gradients_equal_finite_differences():
    logits, halt, targets = a_case(1, passes=4, examples=2)

    def value(step_logits: torch.Tensor, halt_logits: torch.Tensor) -> torch.Tensor:
        log_p = log_halting(halt_logits, 4)
        return ponder_loss(step_logits, log_p, targets, SINGLE_LABEL, 0.3, 0.7).total

    assert torch.autograd.gradcheck(value, (logits.requires_grad_(), halt.requires_grad_()))


def test_depth_does_not_scale_the_task():
    """With the same answer at every pass, the expected loss is that of the answer."""
    logits, halt, targets = a_case(2)
    same = logits[:1].expand(5, -1, -1)
    loss = ponder_loss(same, log_halting(halt, 5), targets, SINGLE_LABEL, 0.3, 0.0)
    assert loss.total.item() == pytest.approx(F.cross_entropy(logits[0], targets).item())


def test_kinds_of_task_equal_torchs_losses():
    logits, _, targets = a_case(3)
    several = (torch.arange(12) % 2).view(4, 3).double()
    numbers = torch.randn(4, dtype=torch.float64)
    for problem, answers, labels, expected in (
        (SINGLE_LABEL, logits[0], targets, F.cross_entropy(logits[0], targets)),
        (
            MULTI_LABEL,
            logits[0],
            several,
            F.binary_cross_entropy_with_logits(logits[0], several),
        ),
        (REGRESSION, logits[0, :, :1], numbers, F.mse_loss(logits[0, :, 0], numbers)),
        (REGRESSION, logits[0], several, F.mse_loss(logits[0], several)),
    ):
        assert answer_loss(answers, labels, problem).item() == pytest.approx(expected.item())


def test_ignored_labels_do_not_count():
    logits, halt, targets = a_case(4)
    targets[1] = -100
    kept = torch.tensor([0, 2, 3])
    log_p = log_halting(halt, 5)
    loss = ponder_loss(logits, log_p, targets, SINGLE_LABEL, 0.3, 0.0)
    alone = ponder_loss(logits[:, kept], log_p[kept], targets[kept], SINGLE_LABEL, 0.3, 0.0)
    assert loss.task.item() == pytest.approx(alone.task.item())


def test_fixed_weights_are_a_weighted_mean():
    logits, _, targets = a_case(5)
    weights = torch.tensor([1.0, 2, 3, 4, 5]) / 15
    each = torch.stack([F.cross_entropy(step, targets) for step in logits])
    loss = fixed_loss(logits, weights, targets, SINGLE_LABEL)
    assert loss.total.item() == pytest.approx((each * weights).sum().item())
    assert loss.kl.item() == 0


@pytest.mark.parametrize(
    ("labels", "num_labels", "problem"),
    [
        (torch.zeros(3), 1, REGRESSION),
        (torch.zeros(3, dtype=torch.long), 2, SINGLE_LABEL),
        (torch.zeros(3, dtype=torch.int), 2, SINGLE_LABEL),
        (torch.zeros(3, 2), 2, MULTI_LABEL),
    ],
)
def test_problem_types_are_those_of_transformers(labels, num_labels, problem):
    assert problem_type(labels, num_labels) == problem
