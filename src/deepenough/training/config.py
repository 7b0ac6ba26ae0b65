"""Settings of the training loop and of where a run goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepenough.errors import UserError


@dataclass
class TrainSettings:
    """Training"""

    steps: int = 2000
    """Optimiser steps."""

    lr: float = 2e-3
    """Highest learning rate."""

    warmup: int = 400
    """Steps over which the learning rate rises from 0."""

    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""

    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, on matrices only."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of its two moments."""

    clip: float = 1.0
    """Largest norm of the gradient; 0 for no limit."""

    accumulate: int = 1
    """Batches whose gradients make one step."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the matrix products; auto takes bf16 on a GPU and fp32 on a CPU."""

    compile: bool = False
    """Compile the model with torch.compile first."""

    threads: int | None = None
    """CPU threads; by default torch's choice."""

    seed: int = 0
    """Everything random is a function of it."""

    log_every: int = 50
    """Steps between training records."""

    valid_every: int = 500
    """Steps between validations; there is always one at the end."""

    save_every: int = 500
    """Steps between checkpoints; there is always one at the end."""

    keep: int = 2
    """Checkpoints kept."""

    def check(self) -> None:
        for name in ("steps", "accumulate", "log_every", "valid_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} must be at least 1: got {getattr(self, name)}.")
        for name in ("warmup", "weight_decay", "clip"):
            if not getattr(self, name) >= 0:  # so that NaN is refused as well
                raise UserError(f"train.{name} must not be negative: got {getattr(self, name)}.")
        if not 0 < self.lr < math.inf:
            raise UserError(f"train.lr must be above 0: got {self.lr}.")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"train.threads must be at least 1: got {self.threads}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"train.betas must be two numbers in [0, 1): got {self.betas}.")

    def for_epochs(self, epochs: float, batches: int) -> TrainSettings:
        """With as many steps as so many rounds over the batches of an epoch take."""
        return replace(self, steps=max(1, math.ceil(epochs * batches / self.accumulate)))

    def identity(self) -> dict[str, Any]:
        """What a run must share with the checkpoint that it goes on from.

        Not the learning rate and its clipping: both may be lowered to get past a divergence.
        """
        names = ("steps", "warmup", "schedule", "weight_decay", "betas", "accumulate", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass
class RunSettings:
    """Where the run goes"""

    folder: str = "runs/latest"
    """Folder for everything the run leaves."""

    resume: bool = False
    """Go on from the last checkpoint in the folder."""

    overwrite: bool = False
    """Delete an earlier run in the folder."""
