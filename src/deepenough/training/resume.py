"""The whole state of a training, saved and restored over all its processes.

A checkpoint holds the lanes of all processes, so a run may go on with another number of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.runs import RunFolder
from deepenough.training import checkpoint as checkpoints
from deepenough.training.checkpoint import Checkpoint
from deepenough.training.distributed import all_lanes, on_main, own_lanes
from deepenough.training.recorder import Meter
from deepenough.training.task import Task

log = logging.getLogger("deepenough")


@dataclass
class TrainingState:
    run: RunFolder
    accelerator: Accelerator
    task: Task
    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    meter: Meter

    def save(self, step: int, keep: int) -> None:
        lanes = all_lanes(self.accelerator, self.task.state())

        def write() -> None:
            tensors: dict[str, Tensor] = {}
            for phase, optimizer in self.optimizers.items():
                tensors |= checkpoints.optimizer_tensors(phase, optimizer)
            values = {"run": self.task.identity(), "meter": asdict(self.meter)}
            content = Checkpoint(step, dict(self.model.state_dict()), tensors, lanes, values)
            checkpoints.save(self.run.checkpoints, content, keep)

        on_main(self.accelerator, write)

    def restore(self) -> int:
        """Load the last readable checkpoint, if there is any; the step to go on from."""
        found, damaged = checkpoints.load_last(self.run.checkpoints)
        step = found.step if found is not None else 0
        if step != on_main(self.accelerator, lambda: step):
            raise UserError(
                f"Not all processes see the same checkpoints in {self.run.path}: put the run on a "
                "file system that they share."
            )
        if self.accelerator.is_main_process:
            for name in damaged:
                log.warning("The checkpoint %s cannot be read: going on from step %d.", name, step)
        if found is None:
            return 0
        check_identity(found.values["run"], self.task.identity(), self.run)
        self.model.load_state_dict(found.model)
        for phase, optimizer in self.optimizers.items():
            checkpoints.restore_optimizer(phase, optimizer, found.optimizers)
        self.meter.load(found.values["meter"])
        self.task.load_state(own_lanes(self.accelerator, found.task))
        log.info("going on from step %d", step)
        return step


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], run: RunFolder) -> None:
    """A UserError that names the first setting in which a checkpoint and a run differ."""
    before, now = _flatten(saved), _flatten(current)
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            raise UserError(
                f"The checkpoint in {run.path} is of another configuration: {key} was "
                f"{before[key]} and is now {now[key]}; give the same settings or another folder."
            )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
