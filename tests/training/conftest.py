"""A training so small that the loop itself can be watched, and a disk that is full at will."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.runs import RunFolder
from deepenough.training.config import TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import Trainer


class Line(Task):
    """Fit a line to noisy points, with a memory of the last ones: a task of four lanes."""

    unit = "points"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.memory = torch.zeros(4, 1)
        self.seen: list[tuple[int, int]] = []

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        return {"weights": [{"params": list(self.model.parameters())}]}

    def begin_step(self, step: int) -> None:
        pass

    def phases(self, step: int) -> Sequence[str]:
        return ("weights",)

    def points(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + micro)
        inputs = torch.randn(4, 2, generator=generator)
        return inputs, inputs.sum(1, keepdim=True)

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        self.seen.append((step, micro))
        inputs, targets = self.points(step, micro)
        noise = 0.1 * torch.rand(4, 1)  # from the global generator, as dropout is
        output = model(torch.cat([inputs, self.memory], 1))
        self.memory = output.detach()
        loss = (output + noise - targets).square().mean()
        return BatchLoss(loss, loss, len(inputs))

    def end_step(self) -> None:
        pass

    def train_values(self) -> dict[str, Any]:
        return {"memory": float(self.memory.sum())}

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        return {"loss": float(self.model.weight.detach().square().sum())}

    def state(self) -> dict[str, Tensor]:
        return {"memory": self.memory}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.memory = state["memory"]

    def identity(self) -> dict[str, Any]:
        return {"task": {"name": "line", "lanes": 4}}

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights.txt").write_text(str(self.model.weight.tolist()))


@pytest.fixture
def line() -> type[Line]:
    return Line


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """Train a task in a folder, from the checkpoint there if there is one."""

    def run(task: Line, folder: str = "run", **changes: Any) -> Trainer:
        values: dict[str, Any] = {"steps": 10, "warmup": 2, "lr": 0.1, "log_every": 3}
        values |= {"valid_every": 5, "save_every": 4}
        settings = TrainingConfig(**(values | changes))
        place = RunFolder.create(tmp_path / folder, resume=True)
        place.config.touch()
        trainer = Trainer(task, settings, place, make_accelerator(settings))
        trainer.resume()
        trainer.fit()
        return trainer

    return run
