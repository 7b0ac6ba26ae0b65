"""When a classifier halts: the distribution over passes, the loss that trains it, exit policies.

**Distribution** (PonderNet, arXiv 2107.05407). After pass `n` of `N` the model halts with
probability `lambda_n`, given that it got so far:

    p_n = lambda_n * prod_{j<n} (1 - lambda_j)        n < N
    p_N = prod_{j<N} (1 - lambda_j)                   the last pass takes what is left

so that `sum_n p_n = 1` and `lambda_N` plays no part. Everything is computed from the logits of
`lambda` in log space: probabilities that underflow keep exact logarithms and gradients. The prior
is the geometric distribution of a process cut off at `N` in the same way: its last pass takes the
remainder too, rather than all passes being scaled up. A model with `lambda_n` equal to the prior's
at every pass then has a divergence of exactly 0.

**Loss** (PonderNet, eq. 7), averaged over the examples, so that `beta` means the same at any depth:

    L = sum_n p_n * L(y_n, target)  +  beta * KL(p || geometric(lambda_p))

The baselines are the same sum with weights that are fixed instead of learned, and no divergence:
all weight on the last pass, or weights growing with the pass (PABEE, arXiv 2006.04152, eq. 4).

**Policies** decide in evaluation which examples stop. A policy never sees the batch as a whole, and
what it must remember of an example is a row of a tensor: in whatever batch an example runs, it
halts at the same pass.

Shapes: B examples, R of them still running, N passes, D width, C labels, K numbers remembered.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepenough.data.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from deepenough.errors import UserError
from deepenough.ponder.config import CONFIDENCE, QUANTILE, PonderConfig

HALTING_WIDTH = 128
"""Units of the halting head's hidden layers: it decides one number, whatever the model's width."""

TOLERANCE = 0.2
"""By how much two values of a regression may differ to count as the same answer (PALBERT)."""

LEAD_GAIN = 10.0
"""Factor of the weight of an answer's lead: without it a single weight would take thousands of
Adam's steps to become as large as is useful."""


# -- the head and the distribution -----------------------------------------------------------------


class HaltingHead(nn.Module):
    """Computes the logit of `lambda_n`, `[R]`.

    `previous`: three layers over `h_n` and `h_(n-1)` joined, which see whether a pass still changed
    anything (PALBERT, arXiv 2204.03276). `answer`: the same, and a multiple of the lead of the best
    answer's logit over the second: how sure an answer is tells best whether more passes would help,
    and a head that must find it in the states needs far more examples. `second_cls`: one layer over
    a token of its own.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.hidden: nn.Module = nn.Identity()
        if kind != "second_cls":
            sizes = (2 * width, HALTING_WIDTH), (HALTING_WIDTH, HALTING_WIDTH)
            first, second = (nn.Linear(*size) for size in sizes)
            self.hidden, width = nn.Sequential(first, nn.Tanh(), second, nn.Tanh()), HALTING_WIDTH
        self.out = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(()))  # starts at the prior's halting probability
        self.lead = nn.Parameter(torch.zeros(())) if kind == "answer" else None

    def forward(self, now_RD: Tensor, before_RD: Tensor, logits_RC: Tensor) -> Tensor:
        """Return the halting logits from the states of this pass and the last, and the answers."""
        read = now_RD if self.kind == "second_cls" else torch.cat([now_RD, before_RD], -1)
        logit: Tensor = self.out(self.hidden(read)).squeeze(-1) + self.bias
        if self.lead is not None:
            # Detached: the wish to halt must not change the answers.
            best_R2 = logits_RC.detach().topk(2, -1).values
            logit = logit + LEAD_GAIN * self.lead * (best_R2[:, 0] - best_R2[:, 1])
        return logit


def log_survival(halt_logits_BN: Tensor) -> Tensor:
    """Return `log prod_{j<=n} (1 - lambda_j)`, the probability of going on after pass `n`."""
    return F.logsigmoid(-halt_logits_BN).cumsum(-1)


def log_halting(halt_logits_BN: Tensor, num_passes: int) -> Tensor:
    """Return `log p_n`, `[B, N]`, from the logits of `lambda_1 ... lambda_(N-1)`.

    Later logits are unused; fewer than `N - 1` are a ValueError.
    """
    logits = halt_logits_BN[..., : num_passes - 1]
    if logits.shape[-1] != num_passes - 1:
        raise ValueError(f"{num_passes} passes need {num_passes - 1} halting logits")
    reached = F.pad(log_survival(logits), (1, 0))  # the first pass is reached with certainty
    halts = F.pad(F.logsigmoid(logits), (0, 1))  # the last pass halts with certainty
    return reached + halts


def log_geometric(target: float, num_passes: int, like: Tensor | None = None) -> Tensor:
    """Return the logarithm of the geometric prior `[N]` with halting probability `target`.

    `like` gives device and dtype.
    """
    if not 0.0 < target < 1.0:
        raise UserError(f"The halting target must be above 0 and below 1: got {target}.")
    device, dtype = (None, torch.float32) if like is None else (like.device, like.dtype)
    steps = torch.arange(num_passes, device=device, dtype=dtype)
    prior = steps * math.log1p(-target)
    prior[:-1] += math.log(target)
    return prior


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `KL(p || q) = sum_n p_n (log p_n - log q_n)`, one number an example.

    In this direction, the model's distribution first, `p` is kept from where the prior `q` has
    little mass, and pays nothing for passes it never uses.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# -- the loss --------------------------------------------------------------------------------------


class PonderLoss(NamedTuple):
    """The loss of a batch, and its terms."""

    total: Tensor
    """What is minimised."""
    task: Tensor
    """`sum_n p_n L(y_n, target)`, a mean over the examples."""
    kl: Tensor
    """`KL(p || prior)` before `beta`, a mean over the examples; 0 where weights are fixed."""


def check_labels(
    labels: Tensor, num_examples: int, num_labels: int, problem: str = SINGLE_LABEL
) -> None:
    """Refuse labels of the wrong number, type or range, naming the first bad example."""
    each = 1 if problem == SINGLE_LABEL else num_labels
    if labels.numel() != num_examples * each:
        wanted = "as many labels" if each == 1 else f"{each} numbers each as labels"
        raise UserError(f"{num_examples} examples need {wanted}: got {tuple(labels.shape)}.")
    if problem == SINGLE_LABEL and labels.is_floating_point():
        raise UserError(f"Labels must be whole numbers, one an example: got {labels.dtype}.")
    if labels.device.type != "cpu":
        return  # looking at them would make the device wait
    rows = labels.view(num_examples, each)
    if problem == REGRESSION:
        wrong, known = ~rows.isfinite(), "answers with finite numbers: correct it"
    elif problem == MULTI_LABEL:
        wrong, known = (rows < 0) | (rows > 1), "answers with 0 or 1 for each label: correct it"
    else:
        wrong = (rows < 0) | (rows >= num_labels)
        known = f"has labels 0 to {num_labels - 1}: correct it, or give the model more (num_labels)"
    if wrong.any():
        row = int(wrong.any(-1).nonzero()[0])
        found = rows[row][wrong[row]][0].item()
        raise UserError(f"The label of example {row} is {found}, and the model {known}.")


def ponder_loss(
    step_logits_NBC: Tensor,
    log_p_BN: Tensor,
    labels: Tensor,
    halting_target: float,
    kl_weight: float,
    problem: str = SINGLE_LABEL,
    distill: float = 0.0,
) -> PonderLoss:
    """Return PonderNet's loss from the answers of all passes and the halting distribution."""
    losses_NB = _losses(step_logits_NBC, labels, problem, distill)
    task = (log_p_BN.exp().T * losses_NB).sum(0).mean()
    prior = log_geometric(halting_target, log_p_BN.shape[-1], like=log_p_BN)
    divergence = kl(log_p_BN, prior).mean()
    return PonderLoss(task + kl_weight * divergence, task, divergence)


def fixed_loss(
    step_logits_NBC: Tensor,
    weights_N: Tensor,
    labels: Tensor,
    problem: str = SINGLE_LABEL,
    distill: float = 0.0,
) -> PonderLoss:
    """Return the baselines' loss; `weights_N` say how much the answer of each pass matters."""
    losses_NB = _losses(step_logits_NBC, labels, problem, distill)
    task = (weights_N.to(step_logits_NBC)[:, None] * losses_NB).sum(0).mean()
    return PonderLoss(task, task, torch.zeros_like(task))


def answer_loss(logits_BC: Tensor, labels: Tensor, problem: str = SINGLE_LABEL) -> Tensor:
    """Return the loss of the answers that were given, whatever passes they come from."""
    return _losses(logits_BC[None], labels, problem).mean()


def _losses(logits_NBC: Tensor, labels: Tensor, problem: str, distill: float = 0.0) -> Tensor:
    """Return `L(y_n, target)` of every pass and example, `[N, B]`, at least in float32.

    A share `distill` of the target of passes before the last is what the last pass says, whose
    probabilities tell more than a label does (FastBERT, arXiv 2004.02178).
    """
    logits = logits_NBC.to(torch.promote_types(logits_NBC.dtype, torch.float32))
    losses_NB = _distance(logits, labels, problem)
    if not distill:
        return losses_NB
    taught = _distance(logits[:-1], probabilities(logits[-1].detach(), problem), problem)
    return torch.cat([torch.lerp(losses_NB[:-1], taught, distill), losses_NB[-1:]])


def _distance(logits_NBC: Tensor, wanted: Tensor, problem: str) -> Tensor:
    """Return the loss `[N, B]` against numbers of labels `[B]`, or what each output is to be."""
    if problem == SINGLE_LABEL and not wanted.is_floating_point():
        wanted_NB = wanted.view(-1).long().expand(len(logits_NBC), -1)
        return F.cross_entropy(logits_NBC.movedim(-1, 1), wanted_NB, reduction="none")
    wanted_NBC = wanted.to(logits_NBC).view(logits_NBC.shape[1:]).expand_as(logits_NBC)
    if problem == SINGLE_LABEL:
        return -(wanted_NBC * logits_NBC.log_softmax(-1)).sum(-1)
    loss = F.mse_loss if problem == REGRESSION else F.binary_cross_entropy_with_logits
    return loss(logits_NBC, wanted_NBC, reduction="none").mean(-1)


def confidence(logits: Tensor, problem: str = SINGLE_LABEL) -> Tensor:
    """Return the probability of the answer, `[...]`; of several labels that of the least sure."""
    found = probabilities(logits, problem)
    return torch.maximum(found, 1 - found).amin(-1) if problem == MULTI_LABEL else found.amax(-1)


def decide(logits: Tensor, problem: str = SINGLE_LABEL) -> Tensor:
    """Return the answers to outputs `[..., C]`: a label's number, 0 or 1 for each, or the value."""
    if problem == SINGLE_LABEL:
        return logits.argmax(-1)
    return (logits > 0).to(logits.dtype) if problem == MULTI_LABEL else logits.squeeze(-1)


def probabilities(logits: Tensor, problem: str = SINGLE_LABEL) -> Tensor:
    """Return what outputs `[..., C]` say: probabilities of labels, or the values themselves."""
    if problem == REGRESSION:
        return logits
    return logits.sigmoid() if problem == MULTI_LABEL else logits.softmax(-1)


class PonderClassificationLoss:
    """The loss as an object for training loops of one's own, as PonderALBERT's source has it.

    Called with the output of a model that made all passes and the labels, it returns `total_loss`,
    which is to be minimised, and its terms `weighted_ce_loss` and `kl_loss`, weighed.
    """

    def __init__(self, kl_penalty_factor: float = 0.5, problem: str = SINGLE_LABEL) -> None:
        self.kl_penalty_factor, self.problem = kl_penalty_factor, problem

    def __call__(self, output: Any, labels: Tensor | Sequence[Any]) -> dict[str, Tensor]:
        """Return the loss and its terms; labels may be a list."""
        if output.step_logits is None or output.halt_logits is None:
            raise UserError(
                "The loss needs the answers of all passes of a model that halts: call the model in "
                "training mode, or with all_passes=True."
            )
        steps, weight = output.step_logits, self.kl_penalty_factor
        labels = torch.as_tensor(labels, device=steps.device)
        check_labels(labels, steps.shape[1], steps.shape[2], self.problem)
        log_p = log_halting(output.halt_logits, len(steps))
        target = min(float(output.prior[0, 0]), 0.5 if len(steps) == 1 else 1.0)
        loss = ponder_loss(steps, log_p, labels, target, weight, self.problem)
        terms = {"kl_loss": weight * loss.kl, "weighted_ce_loss": loss.task}
        return {"total_loss": loss.total, **terms}


# -- policies --------------------------------------------------------------------------------------


class StepView(NamedTuple):
    """What is known of the running examples after a pass."""

    passes: int
    """How many passes they have made."""
    logits: Tensor
    """Their answers now, `[R, C]`."""
    log_survival: Tensor | None
    """`log prod_{j<=n} (1 - lambda_j)`, `[R]`; None of a model without halting probabilities."""
    problem: str = SINGLE_LABEL
    """What the answers mean."""


class HaltingPolicy(ABC):
    """Decides which examples stop. The last pass stops all, whatever the policy."""

    needs_halting = False
    """Whether it reads halting probabilities."""
    needs_labels = False
    """Whether it reads probabilities of labels, which a regression does not have."""

    def start(self, example_ids: Tensor) -> Tensor:
        """Return what to remember of examples that begin, `[R, K]`; the ids number them."""
        return torch.empty(len(example_ids), 0, device=example_ids.device)

    @abstractmethod
    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which examples halt, `[R]`, and what to remember of all of them."""


class QuantileExit(HaltingPolicy):
    """Stops at the first `n` with `p_1 + ... + p_n >= threshold`; 1 runs all passes.

    This is Q-exit of PALBERT (arXiv 2204.03276).
    """

    needs_halting = True

    def __init__(self, threshold: float = QUANTILE) -> None:
        check_threshold(threshold)
        self.threshold = threshold

    def start(self, example_ids: Tensor) -> Tensor:
        """Return the bound on the log-survival; at a threshold of 1 it is never reached."""
        left = torch.tensor(1.0 - self.threshold, device=example_ids.device).log()
        return left.expand(len(example_ids), 1)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which examples run on with no more than the probability set at the start."""
        assert view.log_survival is not None
        return view.log_survival <= memory[:, 0], memory


class SampledExit(QuantileExit):
    """Stops at a pass drawn from the halting distribution (PonderNet).

    A quantile exit whose threshold is drawn uniformly for each example: the distribution is that of
    one Bernoulli number a pass. With a seed the draw is a function of seed and example alone, so
    that batching cannot matter.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def start(self, example_ids: Tensor) -> Tensor:
        """Return the log-survival at which each example is to stop."""
        if self.seed is None:
            left = torch.rand(len(example_ids), 1)
        else:
            draws = [_uniform(self.seed, int(example)) for example in example_ids.tolist()]
            left = torch.tensor(draws, dtype=torch.float32)[:, None]
        return left.log().to(example_ids.device)


class PatienceExit(HaltingPolicy):
    """Stops when an answer was repeated `patience` times in a row (PABEE, arXiv 2006.04152).

    The answer is the label, the set of labels, or of a regression a value that differs by less than
    `tolerance` from the one before.
    """

    def __init__(self, patience: int = 2, tolerance: float = TOLERANCE) -> None:
        if patience < 1:
            raise UserError(f"The patience of an exit must be at least 1: got {patience}.")
        self.patience, self.tolerance = patience, tolerance

    def start(self, example_ids: Tensor) -> Tensor:
        """Return 0 repetitions of an answer that nothing is equal to."""
        return torch.tensor([0.0, math.nan], device=example_ids.device).expand(len(example_ids), 2)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which answers were repeated often enough; remember count and answer."""
        now = decide(view.logits, view.problem).to(memory.dtype).view(len(memory), -1)
        count, last = memory[:, 0], memory[:, 1:]
        near = (now - last).abs() < self.tolerance if view.problem == REGRESSION else now == last
        count = torch.where(near.all(-1), count + 1, 0)
        return count >= self.patience, torch.cat([count[:, None], now], -1)


class ConfidenceExit(HaltingPolicy):
    """Stops when the answer has at least this probability (DeeBERT, arXiv 2004.12993).

    Of several labels that may hold, the least sure one counts; a value has no probability.
    """

    needs_labels = True

    def __init__(self, threshold: float = CONFIDENCE) -> None:
        check_threshold(threshold)
        self.threshold = threshold

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which answers are sure enough."""
        return confidence(view.logits.float(), view.problem) >= self.threshold, memory


class FixedExit(HaltingPolicy):
    """Stops after `num_passes`; None runs all."""

    def __init__(self, num_passes: int | None = None) -> None:
        if num_passes is not None and num_passes < 1:
            raise UserError(f"A fixed exit needs at least 1 pass: got {num_passes}.")
        self.num_passes = num_passes

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the examples have made their passes."""
        halts = self.num_passes is not None and view.passes >= self.num_passes
        return torch.full_like(view.logits[:, 0], halts, dtype=torch.bool), memory


POLICIES: dict[str, Callable[[Any], HaltingPolicy]] = {
    "quantile": QuantileExit,
    "confidence": ConfidenceExit,
    "patience": PatienceExit,
    "fixed": FixedExit,
    "sampled": SampledExit,
}
"""Policies by the names of exits; each takes the exit's setting."""


def make_policy(config: PonderConfig) -> HaltingPolicy:
    """Return the policy of the exit that a config names or has by default, with its options."""
    return POLICIES[config.exit_kind](config.exit_value)


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is no probability above 0."""
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"The exit threshold must be above 0 and at most 1: got {threshold}.")


def _uniform(seed: int, example: int) -> float:
    """Return a number in (0, 1]: the probability left when the example is to stop."""
    stream = np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, example])
    return 1.0 - float(np.random.Generator(stream).random())
