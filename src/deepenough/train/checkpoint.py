"""Checkpoints: folders of safetensors and JSON, complete or absent.

A checkpoint is written under a temporary name and renamed when everything is on disk, so that a kill
or a full disk at any moment leaves the previous one as it was. Nothing is pickled. Randomness needs no
place in it: the loop derives every seed from the run's seed and the step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepenough.errors import UserError

_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    model: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    task: list[dict[str, Tensor]]
    """One entry a process: state that follows its share of the data."""
    values: dict[str, Any]
    """Small things: what the run is about, and how far it is."""


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write one checkpoint, then delete all but the last `keep`."""
    final = folder / f"{_PREFIX}{checkpoint.step:09d}"
    partial = folder / f"{final.name}.tmp"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _save_tensors(checkpoint.model, partial / "model.safetensors")
        _save_tensors(checkpoint.optimizers, partial / "optimizers.safetensors")
        for rank, state in enumerate(checkpoint.task):
            _save_tensors(state, partial / f"task-{rank}.safetensors")
        content = {"step": checkpoint.step, "processes": len(checkpoint.task)} | checkpoint.values
        _write(partial / "state.json", json.dumps(content, indent=1).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"The checkpoint of step {checkpoint.step} could not be written to {folder} ({error}); "
            "the previous one is intact: make room and go on with --resume."
        ) from error
    for old in _names(folder)[:-keep]:
        shutil.rmtree(folder / old, ignore_errors=True)
    return final


def load_last(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read, and the names of newer ones that cannot.

    A UserError if there are checkpoints but none is readable.
    """
    damaged: list[str] = []
    for name in reversed(_names(folder)):
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


def _load(path: Path) -> Checkpoint:
    values = json.loads((path / "state.json").read_text())
    step, processes = values.pop("step"), values.pop("processes")
    return Checkpoint(
        step=step,
        model=load_file(path / "model.safetensors"),
        optimizers=load_file(path / "optimizers.safetensors"),
        task=[load_file(path / f"task-{rank}.safetensors") for rank in range(processes)],
        values=values,
    )


def _names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    return sorted(n for n in names if n.startswith(_PREFIX) and not n.endswith(".tmp"))


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Tied weights share memory, which safetensors refuses; a checkpoint may hold them twice.
    save_file({name: value.detach().cpu().clone() for name, value in tensors.items()}, path)
    _sync(path)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def optimizer_tensors(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as named tensors: `name.parameter.key`."""
    return {
        f"{name}.{index}.{key}": torch.as_tensor(value)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def restore_optimizer(
    name: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        owner, index, key = full_name.split(".", 2)
        if owner == name:
            state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
