"""Settings of the training loop and of where a run goes."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

from deepenough.config import bounded
from deepenough.errors import UserError


@dataclass
class TrainingConfig:
    """Settings of the training loop."""

    steps: int = bounded(2000, ge=1)
    """Optimiser steps."""

    lr: float = bounded(2e-3, gt=0, lt=math.inf)
    """Highest learning rate."""

    warmup: float = bounded(0.2, ge=0)
    """Steps over which the learning rate rises from 0; below 1, a share of the training."""

    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""

    optimizer: Literal[
        "adamw", "adam", "adamax", "nadam", "adagrad", "adadelta", "rmsprop", "sgd"
    ] = "adamw"
    """Optimiser, as torch.optim has it."""

    weight_decay: float | None = bounded(None, ge=0)
    """Weight decay, on matrices only: decoupled in AdamW, where it is 0.01 by default; in the other
    optimisers an L2 penalty, by default none."""

    betas: list[float] = bounded(default_factory=lambda: [0.9, 0.999], ge=0, lt=1)
    """Decay rates of the two moments of AdamW, Adam, Adamax and NAdam."""

    clip: float = bounded(1.0, ge=0)
    """Largest norm of the gradient; 0 for no limit."""

    clip_value: float = bounded(0.0, ge=0)
    """Largest absolute value in the gradient, cut before its norm is; 0 for no limit."""

    accumulate: int = bounded(1, ge=1)
    """Batches whose gradients make one step."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the matrix products; auto takes bf16 on a GPU and fp32 on a CPU, which has
    no other."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes hold: each the whole model and its optimiser (ddp), or a share of both
    (fsdp)."""

    threads: int | None = bounded(None, ge=1)
    """CPU threads; by default torch's choice."""

    seed: int = 0
    """Everything random is a function of it."""

    log_every: int = bounded(50, ge=1)
    """Steps between training records."""

    valid_every: int = bounded(500, ge=1)
    """Steps between validations; there is always one at the end."""

    save_every: int = bounded(500, ge=1)
    """Steps between checkpoints; there is always one at the end."""

    keep: int = bounded(2, ge=1)
    """Checkpoints kept."""

    def check(self) -> None:
        """Refuse what no single range can tell."""
        if len(self.betas) != 2:
            raise UserError(f"train.betas must be two numbers: got {self.betas}.")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UserError(
                f"train.warmup is a number of steps or a share below 1: got {self.warmup}."
            )

    @property
    def warmup_steps(self) -> int:
        """Return the steps of the warm-up; one longer than the training is a tenth of that."""
        given = self.warmup if self.warmup >= 1 else round(self.warmup * self.steps)
        return int(given) if given <= self.steps else self.steps // 10

    @property
    def decay(self) -> float:
        """Return the weight decay, its default resolved."""
        if self.weight_decay is None:
            return 0.01 if self.optimizer == "adamw" else 0.0
        return self.weight_decay

    def steps_of(self, epochs: float, batches: int) -> int:
        """Return how many steps so many rounds over the batches of an epoch take."""
        return max(1, math.ceil(epochs * batches / self.accumulate))

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the checkpoint that it goes on from.

        Not the learning rate and its clipping, which may be lowered to get past a divergence, nor
        the steps: a run may be lengthened.
        """
        names = ("schedule", "optimizer", "betas", "accumulate", "seed")
        resolved = {"weight_decay": self.decay, "warmup": self.warmup_steps}
        return {name: getattr(self, name) for name in names} | resolved


def lr_factor(settings: TrainingConfig, step: int) -> float:
    """Share of the highest learning rate at `step` (counted from 0)."""
    warmup, steps = settings.warmup_steps, settings.steps
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if settings.schedule == "linear":
        return 1.0 - progress
    if settings.schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    return 1.0


def tau_at(kind: str, start: float, end: float, progress: float) -> float:
    """Temperature after a share `progress` of the search; exactly `end` at 1."""
    if kind == "constant":
        return start
    if progress >= 1.0:
        return end
    if kind == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


def seed_at(*place: int | str) -> int:
    """Return a seed for a place in a run, such as (seed, step, process)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes signed numbers
