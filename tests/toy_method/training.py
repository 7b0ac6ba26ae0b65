"""The toy's training: points of a noisy line."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from deepenough.toy.config import ToyTrainConfig
from deepenough.toy.modeling import ToyConfig, ToyModel
from torch import nn

from deepenough.runs import RunFolder
from deepenough.training.config import seed_at
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import begin_run, fit_run


def points(slope: float, *place: int | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 32 points of the line, drawn by their place."""
    generator = torch.Generator().manual_seed(seed_at(*place))
    x = torch.randn(32, generator=generator)
    return x, slope * x + 0.01 * torch.randn(32, generator=generator)


class ToyTask(Task):
    """Squared distance from the line."""

    unit = "points"

    def __init__(self, config: ToyTrainConfig, accelerator: Accelerator) -> None:
        model = ToyModel(ToyConfig(num_blocks=config.num_blocks))
        super().__init__(model, config.train, accelerator)
        self.config = config

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss on the points of a step."""
        x, y = points(self.config.slope, self.config.train.seed, "train", step, micro)
        loss = (model(x).prediction - y).square().mean()
        return BatchLoss(loss, loss, len(x))

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the loss on points of a split."""
        x, y = points(self.config.slope, self.config.train.seed, split)
        with torch.inference_mode():
            return {"loss": float((self.model(x).prediction - y).square().mean())}

    def identity(self) -> dict[str, Any]:
        """Return what decides the losses."""
        own = {"slope": self.config.slope, "num_blocks": self.config.num_blocks}
        return super().identity() | own


def train(config: ToyTrainConfig) -> RunFolder:
    """Train the toy and return its run."""
    accelerator = begin_run(config)
    return fit_run(config, ToyTask(config, accelerator), accelerator)
