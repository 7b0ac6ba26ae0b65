"""Checkpoints on disk: folders of safetensors and JSON, complete or absent.

A checkpoint is written under a temporary name and renamed when everything is on disk, so that a
kill or a full disk at any moment leaves the previous one as it was. Nothing is pickled. Randomness
needs no place in it: the loop derives every seed from the run's seed and the step.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepenough.artifacts import atomic_path
from deepenough.errors import UserError
from deepenough.runs import RunFolder
from deepenough.training.distributed import all_streams, on_main, own_streams
from deepenough.training.logging import Meter
from deepenough.training.task import Task

_PREFIX = "step-"
_STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after a step, as it stands on disk."""

    step: int
    model: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    task: dict[str, Tensor]
    """State that follows the data, all streams of it."""
    values: dict[str, Any]
    """Small things: what the run is about, and what it has counted."""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write one checkpoint, then delete all but the last `keep`.

    Later ones go too: they are of a past from which the run did not go on.
    """
    final = folder / f"{_PREFIX}{checkpoint.step:09d}"
    try:
        _remove_partial(folder)
        with atomic_path(final) as partial:
            partial.mkdir(parents=True)
            _save_tensors(checkpoint.model, partial / "model.safetensors")
            _save_tensors(checkpoint.optimizers, partial / "optimizers.safetensors")
            _save_tensors(checkpoint.task, partial / "task.safetensors")
            content = {"step": checkpoint.step} | checkpoint.values
            (partial / _STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        _remove_partial(folder)
        raise UserError(
            f"The checkpoint of step {checkpoint.step} could not be written to {folder} ({error}); "
            "the previous one is intact: make room and go on with --resume."
        ) from error
    names = list_names(folder)
    kept = names[: names.index(final.name) + 1][-keep:]
    for name in names:
        if name not in kept:
            shutil.rmtree(folder / name, ignore_errors=True)
    return final


def load_last(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that can be read, and the names of newer ones that cannot.

    A UserError if there are checkpoints but none is readable.
    """
    damaged: list[str] = []
    for name in reversed(list_names(folder)):
        try:
            return _load(folder / name), damaged
        except (OSError, ValueError, KeyError, SafetensorError):
            damaged.append(name)
    if damaged:
        raise UserError(
            f"No checkpoint in {folder} can be read ({', '.join(damaged)} damaged or truncated); "
            "start anew with --overwrite."
        )
    return None, []


def list_names(folder: Path) -> list[str]:
    """Return the checkpoints that are there, oldest first."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    return sorted(n for n in names if n.startswith(_PREFIX) and not n.endswith(".tmp"))


def _load(path: Path) -> Checkpoint:
    values = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("the state of a checkpoint is a JSON object")
    return Checkpoint(
        step=values.pop("step"),
        model=_load_tensors(path / "model.safetensors"),
        optimizers=_load_tensors(path / "optimizers.safetensors"),
        task=_load_tensors(path / "task.safetensors"),
        values=values,
    )


def _load_tensors(path: Path) -> dict[str, Tensor]:
    # Copies, because what is loaded is mapped from the file at any alignment, on which the last bit
    # of a matrix product may depend.
    return {name: value.clone() for name, value in load_file(path).items()}


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Tied weights share memory, which safetensors refuses; a checkpoint may hold them twice.
    save_file({name: value.detach().cpu().clone() for name, value in tensors.items()}, path)


def _remove_partial(folder: Path) -> None:
    """Delete what a kill or a full disk has left of a checkpoint."""
    for partial in folder.glob(f"{_PREFIX}*.tmp"):
        shutil.rmtree(partial, ignore_errors=True)


def optimizer_tensors(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's state as named tensors: `name.parameter.key`."""
    return {
        f"{name}.{index}.{key}": torch.as_tensor(value)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def restore_optimizer(
    name: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Load an optimiser's state from the tensors that `optimizer_tensors` named."""
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        owner, index, key = full_name.split(".", 2)
        if owner == name:
            state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


log = logging.getLogger("deepenough")


@dataclass
class TrainingState:
    """The whole state of a training, saved and restored over all its processes."""

    run: RunFolder
    accelerator: Accelerator
    task: Task
    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    meter: Meter

    def save(self, step: int, keep: int) -> None:
        """Write a checkpoint and delete all but the last `keep`."""
        streams = all_streams(self.accelerator, self.task.state())

        def write() -> None:
            tensors: dict[str, Tensor] = {}
            for phase, optimizer in self.optimizers.items():
                tensors |= optimizer_tensors(phase, optimizer)
            values = {"run": self.task.identity(), "meter": asdict(self.meter)}
            content = Checkpoint(step, dict(self.model.state_dict()), tensors, streams, values)
            save(self.run.checkpoints, content, keep)

        on_main(self.accelerator, write)

    def restore(self) -> int:
        """Load the last readable checkpoint, if there is any; the step to go on from."""
        found, damaged = load_last(self.run.checkpoints)
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
            restore_optimizer(phase, optimizer, found.optimizers)
        self.meter.load(found.values["meter"])
        self.task.load_state(own_streams(self.accelerator, found.task))
        log.info("going on from step %d", step)
        return step


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], run: RunFolder) -> None:
    """Refuse a checkpoint of other settings, naming the first in which it and the run differ."""
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
