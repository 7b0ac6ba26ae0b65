"""The loss of a pondering classifier, its terms kept apart (PonderNet, arXiv 2107.05407, eq. 7).

    L = sum_n p_n * L(y_n, target)  +  beta * KL(p || geometric(lambda_p))

both averaged over the examples. The first term is an expectation: it is divided by the number of
examples and by nothing else, so that `beta` means the same at every depth.

The baselines are the same sum with weights that are fixed instead of learned, and no divergence:
all weight on the last pass, or weights growing with the pass (PABEE, arXiv 2006.04152, eq. 4).

Shapes: B examples, N passes, C labels.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepenough.ponder.distribution import geometric_ref, halting_ref, kl, kl_ref, log_geometric

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
REGRESSION: Final = "regression"
SINGLE_LABEL: Final = "single_label_classification"
MULTI_LABEL: Final = "multi_label_classification"

IGNORED = -100
"""A label of this value is passed over, as by every loss of torch."""


class PonderLoss(NamedTuple):
    total: Tensor
    task: Tensor
    """`sum_n p_n L(y_n, target)`, a mean over the examples."""
    kl: Tensor
    """`KL(p || prior)` before `beta`, a mean over the examples; 0 where weights are fixed."""


def problem_type(labels: Tensor, num_labels: int) -> ProblemType:
    """What kind of task labels belong to, by the rule of transformers."""
    if num_labels == 1:
        return REGRESSION
    return SINGLE_LABEL if labels.dtype in (torch.long, torch.int) else MULTI_LABEL


def example_losses(logits: Tensor, labels: Tensor, problem: str) -> Tensor:
    """`L(y, target)` of every pass and example, `[N, B]`, from logits `[N, B, C]`."""
    if problem == SINGLE_LABEL:
        targets = labels.view(-1).long().expand(len(logits), -1)
        return F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
    targets = labels.to(logits.dtype).view(logits.shape[1:]).expand_as(logits)
    if problem == REGRESSION:
        return F.mse_loss(logits, targets, reduction="none").mean(-1)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)


def ponder_loss(
    step_logits_NBC: Tensor,
    log_p_BN: Tensor,
    labels: Tensor,
    problem: str,
    halting_target: float,
    kl_weight: float,
) -> PonderLoss:
    task = _expected_loss(step_logits_NBC, log_p_BN.exp(), labels, problem)
    prior = log_geometric(halting_target, log_p_BN.shape[-1], like=log_p_BN)
    divergence = kl(log_p_BN, prior).mean()
    return PonderLoss(task + kl_weight * divergence, task, divergence)


def fixed_loss(
    step_logits_NBC: Tensor, weights_N: Tensor, labels: Tensor, problem: str
) -> PonderLoss:
    """The baselines' loss: `weights` say how much the answer of each pass matters, for everyone."""
    weights_BN = weights_N.to(step_logits_NBC).expand(step_logits_NBC.shape[1], -1)
    task = _expected_loss(step_logits_NBC, weights_BN, labels, problem)
    return PonderLoss(task, task, torch.zeros_like(task))


def answer_loss(logits_BC: Tensor, labels: Tensor, problem: str) -> Tensor:
    """The loss of the answers that were given, whatever passes they come from."""
    ones = torch.ones(len(logits_BC), 1, device=logits_BC.device, dtype=logits_BC.dtype)
    return _expected_loss(logits_BC[None], ones, labels, problem)


def _expected_loss(logits_NBC: Tensor, p_BN: Tensor, labels: Tensor, problem: str) -> Tensor:
    at_least_float32 = torch.promote_types(logits_NBC.dtype, torch.float32)
    losses_NB = example_losses(logits_NBC.to(at_least_float32), labels, problem)
    expected_B = (p_BN.T * losses_NB).sum(0)
    if problem == SINGLE_LABEL:
        num_counted = (labels.view(-1) != IGNORED).sum().clamp(min=1)
        return expected_B.sum() / num_counted  # ignored examples have a loss of 0
    return expected_B.mean()


def ponder_loss_ref(
    step_logits_NBC: Tensor, lambdas_BN: Tensor, labels: Tensor, target: float, beta: float
) -> tuple[float, float, float]:
    """Total, task and divergence of a single-label task, example by example and pass by pass."""
    step_logits_NBC, lambdas_BN = step_logits_NBC.detach(), lambdas_BN.detach()
    num_passes, num_examples, _ = step_logits_NBC.shape
    task = divergence = 0.0
    for example in range(num_examples):
        p = halting_ref(lambdas_BN[example].tolist())
        for n in range(num_passes):
            log_probabilities = step_logits_NBC[n, example].log_softmax(-1)
            task -= p[n] * float(log_probabilities[labels[example]])
        divergence += kl_ref(p, geometric_ref(target, num_passes))
    task, divergence = task / num_examples, divergence / num_examples
    return task + beta * divergence, task, divergence
