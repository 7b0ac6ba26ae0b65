"""What a method tells the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

WEIGHTS = "weights"


class BatchLoss(NamedTuple):
    """The loss of one batch on this process."""

    objective: Tensor
    """What is minimised."""
    loss: Tensor
    """What is recorded: the same without the terms that are no measure of quality."""
    units: int
    """Tokens or examples in the batch."""


class Task(Protocol):
    unit: str
    """What is counted, for the progress bar: tokens, examples."""

    @property
    def model(self) -> nn.Module: ...

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups of every optimiser; `lr_scale` scales the learning rate of one."""

    def begin_step(self, step: int) -> None: ...

    def phases(self, step: int) -> Sequence[str]:
        """The optimisers that make this step, in order; the first one's loss is recorded."""

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Loss on one batch; `micro` counts the batches of the step."""

    def end_step(self) -> None: ...

    def train_values(self) -> dict[str, Any]:
        """What to record beside the loss."""

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Quality on a split; nothing where there is no such split."""

    def state(self) -> dict[str, Tensor]:
        """What follows the data, lane by lane (first axis), so that it can be dealt out anew."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The same for this process's lanes, after the model's state has been loaded."""

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""

    def save(self, folder: Path) -> None:
        """Write the model in its final form."""


class PlainTask:
    """What most tasks answer: one optimiser, nothing between steps, nothing that follows the data.

    A task says otherwise where it is otherwise.
    """

    phase = WEIGHTS
    """Name of the one optimiser."""

    def begin_step(self, step: int) -> None:
        pass

    def phases(self, step: int) -> Sequence[str]:
        return (self.phase,)

    def end_step(self) -> None:
        pass

    def train_values(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass
