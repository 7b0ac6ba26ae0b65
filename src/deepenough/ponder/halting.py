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
what it must remember of an example is a row of a tensor. So examples may leave, be joined by others
at other depths or run alone, and each halts at the same pass all the same.

Functions ending in `_ref` are the equations as plain loops over one example; tests compare with
them.

Shapes: B examples, R of them still running, N passes, D width, C labels, K numbers remembered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.ponder.config import PonderConfig

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
REGRESSION: Final = "regression"
SINGLE_LABEL: Final = "single_label_classification"
MULTI_LABEL: Final = "multi_label_classification"

IGNORED = -100
"""Label of examples that do not count in the loss, as in torch."""

HALTING_WIDTH = 128
"""Units of the halting head's hidden layers: it decides one number, whatever the model's width."""

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
        if kind in ("previous", "answer"):
            self.hidden: nn.Module = nn.Sequential(
                nn.Linear(2 * width, HALTING_WIDTH),
                nn.Tanh(),
                nn.Linear(HALTING_WIDTH, HALTING_WIDTH),
                nn.Tanh(),
            )
            self.out = nn.Linear(HALTING_WIDTH, 1, bias=False)
        else:
            self.hidden = nn.Identity()
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


def expected_steps(log_p: Tensor) -> Tensor:
    """Return `sum_n n p_n`: how many passes are made on average when halting is sampled."""
    steps = torch.arange(1, log_p.shape[-1] + 1, device=log_p.device, dtype=log_p.dtype)
    return (log_p.exp() * steps).sum(-1)


def halting_ref(lambdas: Sequence[float]) -> list[float]:
    """Return `p_n` of one example; the last `lambda` is not used."""
    result, left = [], 1.0
    for halt in lambdas[:-1]:
        result.append(left * halt)
        left *= 1.0 - halt
    return [*result, left]


def geometric_ref(target: float, num_passes: int) -> list[float]:
    """Return the geometric prior, whose `lambda` is the same at every pass."""
    return halting_ref([target] * num_passes)


def kl_ref(p: Sequence[float], q: Sequence[float]) -> float:
    """Return `KL(p || q)`, with `0 log 0 = 0`."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def expected_steps_ref(p: Sequence[float]) -> float:
    """Return the mean of a distribution over passes, which are counted from 1."""
    return sum(n * mass for n, mass in enumerate(p, start=1))


# -- the loss --------------------------------------------------------------------------------------


class PonderLoss(NamedTuple):
    """The loss of a batch, and its terms."""

    total: Tensor
    """What is minimised."""
    task: Tensor
    """`sum_n p_n L(y_n, target)`, a mean over the examples."""
    kl: Tensor
    """`KL(p || prior)` before `beta`, a mean over the examples; 0 where weights are fixed."""


def problem_type(labels: Tensor, num_labels: int) -> ProblemType:
    """Return the kind of task that labels belong to, by the rule of transformers."""
    if num_labels == 1:
        return REGRESSION
    return SINGLE_LABEL if labels.dtype in (torch.long, torch.int) else MULTI_LABEL


def check_labels(labels: Tensor, num_examples: int, num_labels: int, problem: str) -> None:
    """Refuse labels of the wrong shape, type or range, naming the first bad example."""
    if problem != SINGLE_LABEL:
        if labels.numel() != num_examples * num_labels:
            raise UserError(
                f"{num_examples} examples with {num_labels} target numbers each need labels of "
                f"shape [{num_examples}, {num_labels}]: got {tuple(labels.shape)}."
            )
        return
    if labels.numel() != num_examples:
        raise UserError(f"{num_examples} examples need as many labels: got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        raise UserError(
            f"Labels of a task with one label an example must be whole numbers: got {labels.dtype}."
        )
    if labels.device.type != "cpu":
        return  # looking at them would make the device wait
    wrong = (((labels < 0) | (labels >= num_labels)) & (labels != IGNORED)).view(-1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"The label of example {row} is {int(labels.view(-1)[row])}, and the model has labels "
            f"0 to {num_labels - 1}: correct it, or give the model more (num_labels)."
        )


def example_losses(logits: Tensor, labels: Tensor, problem: str) -> Tensor:
    """Return `L(y, target)` of every pass and example, `[N, B]`, from logits `[N, B, C]`."""
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
    """Return PonderNet's loss from the answers of all passes and the halting distribution."""
    task = _expected_loss(step_logits_NBC, log_p_BN.exp(), labels, problem)
    prior = log_geometric(halting_target, log_p_BN.shape[-1], like=log_p_BN)
    divergence = kl(log_p_BN, prior).mean()
    return PonderLoss(task + kl_weight * divergence, task, divergence)


def fixed_loss(
    step_logits_NBC: Tensor, weights_N: Tensor, labels: Tensor, problem: str
) -> PonderLoss:
    """Return the baselines' loss; `weights_N` say how much the answer of each pass matters."""
    weights_BN = weights_N.to(step_logits_NBC).expand(step_logits_NBC.shape[1], -1)
    task = _expected_loss(step_logits_NBC, weights_BN, labels, problem)
    return PonderLoss(task, task, torch.zeros_like(task))


def answer_loss(logits_BC: Tensor, labels: Tensor, problem: str) -> Tensor:
    """Return the loss of the answers that were given, whatever passes they come from."""
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
    """Return total, task and divergence of a single-label task, one example and pass at a time."""
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


# -- policies --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepView:
    """What is known of the running examples after a pass."""

    passes: Tensor
    """How many passes each has made, `[R]`."""
    logits: Tensor
    """Their answers now, `[R, C]`."""
    log_survival: Tensor | None
    """`log prod_{j<=n} (1 - lambda_j)`, `[R]`; None of a model without halting probabilities."""


class HaltingPolicy(ABC):
    """Decides which examples stop. The last pass stops all, whatever the policy."""

    needs_halting = False
    """Whether it reads halting probabilities."""

    @abstractmethod
    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        """Return what to remember of examples that begin, `[R, K]`; the ids number them."""

    @abstractmethod
    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which examples halt, `[R]`, and what to remember of all of them."""


class _SurvivalExit(HaltingPolicy):
    """Stops once the probability of still running is no more than a bound set at the start."""

    needs_halting = True

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        assert view.log_survival is not None
        return view.log_survival <= memory[:, 0], memory


class QuantileExit(_SurvivalExit):
    """Stops at the first `n` with `p_1 + ... + p_n >= threshold`; 1 runs all passes.

    This is Q-exit of PALBERT (arXiv 2204.03276).
    """

    def __init__(self, threshold: float = 0.5) -> None:
        check_threshold(threshold)
        self.threshold = threshold

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        """Return the bound on the log-survival; at a threshold of 1 it is never reached."""
        left = torch.tensor(1.0 - self.threshold, device=example_ids.device).log()
        return left.expand(len(example_ids), 1)


class SampledExit(_SurvivalExit):
    """Stops at a pass drawn from the halting distribution (PonderNet).

    One uniform number an example is drawn instead of one Bernoulli number a pass: the distribution
    is the same. With a seed it is a function of seed and example alone, so that batching cannot
    matter.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        """Return the log-survival at which each example is to stop."""
        if self.seed is None:
            left = torch.rand(len(example_ids), 1)
        else:
            draws = [_uniform(self.seed, int(example)) for example in example_ids.tolist()]
            left = torch.tensor(draws, dtype=torch.float32)[:, None]
        return left.log().to(example_ids.device)


class PatienceExit(HaltingPolicy):
    """Stops when the answer has been repeated `patience` times in a row (PABEE, arXiv 2006.04152).

    Answers agree if the likeliest label is the same, with several labels if each is decided the
    same, and in a regression if the numbers differ by less than `tolerance`.
    """

    def __init__(
        self, patience: int = 2, problem: str | None = None, tolerance: float = 0.5
    ) -> None:
        if patience < 1:
            raise UserError(f"The patience of an exit must be at least 1: got {patience}.")
        if tolerance <= 0:
            raise UserError(f"The tolerance of an exit must be positive: got {tolerance}.")
        self.patience = patience
        self.problem = problem
        self.tolerance = tolerance

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        """Return 0 repetitions and a last answer of NaN, which nothing agrees with."""
        memory = torch.full((len(example_ids), 1 + num_labels), float("nan"))
        memory[:, 0] = 0.0
        return memory.to(example_ids.device)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which answers were repeated often enough; remember count and answer."""
        count, last, now = memory[:, 0], memory[:, 1:], view.logits.float()
        agree = self._agree(now, last) & ~last.isnan().any(-1)
        count = torch.where(agree, count + 1, torch.zeros_like(count))
        return count >= self.patience, torch.cat([count[:, None], now], -1)

    def _agree(self, now: Tensor, last: Tensor) -> Tensor:
        problem = self.problem or (REGRESSION if now.shape[-1] == 1 else SINGLE_LABEL)
        if problem == REGRESSION:
            return ((now - last).abs() < self.tolerance).all(-1)
        if problem == MULTI_LABEL:
            return ((now > 0) == (last > 0)).all(-1)
        return now.argmax(-1) == last.argmax(-1)


class _MemorylessExit(HaltingPolicy):
    """A policy that remembers nothing between passes."""

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        return torch.empty(len(example_ids), 0, device=example_ids.device)


class ConfidenceExit(_MemorylessExit):
    """Stops when the answer has at least this probability (DeeBERT, arXiv 2004.12993, by entropy).

    With one label that of the likeliest; with several that of the least certain decision.
    """

    def __init__(self, threshold: float = 0.9, problem: str | None = None) -> None:
        check_threshold(threshold)
        if problem == REGRESSION:
            raise UserError("A number has no probability for the confidence exit: use patience.")
        self.threshold = threshold
        self.problem = problem

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which answers are sure enough."""
        logits = view.logits.float()
        if self.problem == MULTI_LABEL:
            sure = logits.abs().sigmoid().amin(-1)
        else:
            sure = logits.softmax(-1).amax(-1)
        return sure >= self.threshold, memory


class FixedExit(_MemorylessExit):
    """Stops after `num_passes`; None runs all."""

    def __init__(self, num_passes: int | None = None) -> None:
        if num_passes is not None and num_passes < 1:
            raise UserError(f"A fixed exit needs at least 1 pass: got {num_passes}.")
        self.num_passes = num_passes

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return which examples have made their passes."""
        if self.num_passes is None:
            return torch.zeros_like(view.passes, dtype=torch.bool), memory
        return view.passes >= self.num_passes, memory


def make_policy(config: PonderConfig, problem: str | None = None) -> HaltingPolicy:
    """Return the policy that `config.exit` names, with its options."""
    policies: dict[str, Callable[[], HaltingPolicy]] = {
        "quantile": lambda: QuantileExit(config.exit_threshold),
        "sampled": lambda: SampledExit(config.exit_seed),
        "confidence": lambda: ConfidenceExit(config.exit_threshold, problem),
        "patience": lambda: PatienceExit(config.exit_patience, problem),
        "fixed": lambda: FixedExit(config.exit_pass),
    }
    return policies[config.exit]()


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is no probability above 0."""
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"The exit threshold must be above 0 and at most 1: got {threshold}.")


def _uniform(seed: int, example: int) -> float:
    """Return a number in (0, 1]: the probability left when the example is to stop."""
    stream = np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, example])
    return 1.0 - float(np.random.Generator(stream).random())
