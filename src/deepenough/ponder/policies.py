"""When to stop in evaluation: policies that look at every example after every pass.

A policy never sees the batch as a whole, and what it must remember of an example is a row of a
tensor. So examples may leave, be joined by others at other depths or be run alone, and each halts
at the same pass all the same.

`QuantileExit` is Q-exit of PALBERT (arXiv 2204.03276). `SampledExit` draws from the halting
distribution (PonderNet, arXiv 2107.05407) by one uniform number an example instead of one Bernoulli
draw a pass, which is the same distribution. `PatienceExit` is PABEE (arXiv 2006.04152).
`ConfidenceExit` asks how probable the answer is (DeeBERT, arXiv 2004.12993, by its entropy).

Shapes: R examples still running, C labels, K numbers remembered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.ponder.loss import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from deepenough.ponder.settings import PonderSettings, check_threshold


@dataclass(frozen=True)
class StepView:
    """What is known of the running examples after a pass."""

    passes: Tensor
    """How many passes each has made, `[R]`."""
    logits: Tensor
    """Their answers now, `[R, C]`."""
    log_survival: Tensor | None
    """`log prod_{j<=n} (1 - lambda_j)`, `[R]`; None of a model without halting probabilities."""


class ExitPolicy(ABC):
    """Decides which examples stop. The last pass stops all, whatever the policy."""

    needs_halting = False
    """Whether it reads halting probabilities."""

    @abstractmethod
    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        """What to remember of examples that begin, `[R, K]`; the ids number them."""

    @abstractmethod
    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Which examples halt, `[R]`, and what to remember of all of them."""


class _SurvivalExit(ExitPolicy):
    """Halts once the probability of still running is no more than a bound set at the start."""

    needs_halting = True

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        assert view.log_survival is not None
        return view.log_survival <= memory[:, 0], memory


class QuantileExit(_SurvivalExit):
    """Stops at the first `n` with `p_1 + ... + p_n >= threshold`; 1 runs all passes."""

    def __init__(self, threshold: float = 0.5) -> None:
        check_threshold(threshold)
        self.threshold = threshold

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        # The bound is on the logarithm of what is left: at a threshold of 1 it is never reached.
        left = torch.tensor(1.0 - self.threshold, device=example_ids.device).log()
        return left.expand(len(example_ids), 1)


class SampledExit(_SurvivalExit):
    """Stops at a pass drawn from the halting distribution."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        if self.seed is None:
            left = torch.rand(len(example_ids), 1)
        else:
            # A function of seed and example alone, so that batching cannot matter.
            draws = [_uniform(self.seed, int(example)) for example in example_ids.tolist()]
            left = torch.tensor(draws, dtype=torch.float32)[:, None]
        return left.log().to(example_ids.device)


class PatienceExit(ExitPolicy):
    """Stops when the answer has been repeated `patience` times in a row.

    Answers agree if the likeliest label is the same, of several labels if each is decided the same,
    and of numbers if they differ by less than `tolerance`.
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
        # How often the answer was repeated, and the last answer: nothing agrees with NaN.
        memory = torch.full((len(example_ids), 1 + num_labels), float("nan"))
        memory[:, 0] = 0.0
        return memory.to(example_ids.device)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
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


class ConfidenceExit(ExitPolicy):
    """Stops when the answer has at least this probability: of one label the likeliest, of several
    the least certain decision."""

    def __init__(self, threshold: float = 0.9, problem: str | None = None) -> None:
        check_threshold(threshold)
        if problem == REGRESSION:
            raise UserError("A number has no probability for the confidence exit: use patience.")
        self.threshold = threshold
        self.problem = problem

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        return torch.empty(len(example_ids), 0, device=example_ids.device)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        logits = view.logits.float()
        if self.problem == MULTI_LABEL:
            sure = logits.abs().sigmoid().amin(-1)
        else:
            sure = logits.softmax(-1).amax(-1)
        return sure >= self.threshold, memory


class FixedExit(ExitPolicy):
    """Stops after `num_passes`; None runs all."""

    def __init__(self, num_passes: int | None = None) -> None:
        if num_passes is not None and num_passes < 1:
            raise UserError(f"A fixed exit needs at least 1 pass: got {num_passes}.")
        self.num_passes = num_passes

    def start(self, example_ids: Tensor, num_labels: int) -> Tensor:
        return torch.empty(len(example_ids), 0, device=example_ids.device)

    def step(self, view: StepView, memory: Tensor) -> tuple[Tensor, Tensor]:
        if self.num_passes is None:
            return torch.zeros_like(view.passes, dtype=torch.bool), memory
        return view.passes >= self.num_passes, memory


def make_policy(settings: PonderSettings, problem: str | None = None) -> ExitPolicy:
    """The policy that settings ask for."""
    policies: dict[str, Callable[[], ExitPolicy]] = {
        "quantile": lambda: QuantileExit(settings.exit_threshold),
        "sampled": lambda: SampledExit(settings.exit_seed),
        "confidence": lambda: ConfidenceExit(settings.exit_threshold, problem),
        "patience": lambda: PatienceExit(settings.exit_patience, problem),
        "fixed": lambda: FixedExit(settings.exit_pass),
    }
    return policies[settings.exit]()


def _uniform(seed: int, example: int) -> float:
    """In (0, 1]: what is left of the probability when the example is to stop."""
    stream = np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, example])
    return 1.0 - float(np.random.Generator(stream).random())
