"""Settings of the toy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from deepenough.config import RunConfig, bounded
from deepenough.training.config import TrainingConfig


@dataclass
class ToyTrainConfig(RunConfig):
    """Settings of `deepenough toy train`."""

    METHOD: ClassVar[str] = "toy"

    slope: float = bounded(2.0, ge=-10, le=10)
    """Slope of the line that is to be found."""

    num_blocks: int = bounded(3, ge=1)
    """Blocks of the model."""

    train: TrainingConfig = field(default_factory=lambda: TrainingConfig(lr=0.02, warmup=1))


@dataclass
class ToyEvalConfig:
    """Settings of `deepenough toy eval`."""

    run: str
    """Folder of a finished run."""

    blocks: int | None = bounded(None, ge=1)
    """Blocks to run; by default all."""


@dataclass
class ToyGrid:
    """Operating points of the toy in a comparison."""

    blocks: list[int] | None = bounded(None, ge=1)
    """Toy: blocks to run."""


GRID = ToyGrid
