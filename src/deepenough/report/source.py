"""What the figures read: one run folder as records and settings, nothing else.

Values are checked here, once, so that the figures may trust them: a number that is missing, not a
number or infinite is simply not there, and a row of block probabilities counts only if it is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from deepenough.errors import UserError
from deepenough.report.style import BRANCHES, LETTERS
from deepenough.runs import Record, RunFolder, read_records


@dataclass(frozen=True)
class Run:
    """A run as its files tell it."""

    name: str
    records: Sequence[Record]
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was wrong with the files and had to be left out, a sentence each."""


@dataclass(frozen=True)
class BlockState:
    """The block-type probabilities at one step."""

    step: int
    pi: np.ndarray
    """[num_blocks, 3], columns in the order of `BRANCHES`."""
    tau: float | None = None

    @property
    def pattern(self) -> str:
        """The leading branch of every block, as letters."""
        return "".join(LETTERS[i] for i in self.pi.argmax(axis=1))


def read_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Read several run folders, each named by as much of its path as tells it from the others."""
    parts = [Path(path).resolve().parts for path in paths]
    runs = [read_run(path) for path in paths]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs


def read_run(path: Path | str) -> Run:
    """Read a run folder; UserError when it is not one or holds no record."""
    folder = RunFolder.open(path)
    notes = []
    records, num_corrupted = read_records(folder.metrics) if folder.metrics.exists() else ([], 0)
    if num_corrupted:
        notes.append(f"{num_corrupted} unreadable line(s) of {folder.metrics} skipped.")
    if not records:
        raise UserError(
            f"The run {path} has no record in {folder.metrics.name}, so there is nothing to draw; "
            "let it train until the first log line, or name another folder."
        )
    losses = [record.values.get("loss") for record in records]
    num_diverged = sum(isinstance(loss, float) and not math.isfinite(loss) for loss in losses)
    if num_diverged:
        notes.append(f"{num_diverged} loss(es) in {folder.metrics} not finite and left out.")
    config = _read_config(folder.config)
    if config is None:
        notes.append(f"{folder.config} is not readable and was left out.")
    return Run(Path(path).resolve().name, records, config or {}, tuple(notes))


def _read_config(path: Path) -> dict[str, Any] | None:
    """The settings as they stand in the file, {} without one, None if it cannot be understood."""
    if not path.exists():
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return loaded if isinstance(loaded, dict) else None


def number(value: Any) -> float | None:
    """`value` as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def series(run: Run, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one quantity by rising step; the later record of a step counts."""
    found: dict[int, float] = {}
    for record in run.records:
        value = number(record.values.get(name)) if record.kind == kind else None
        if value is not None:
            found[record.step] = value
    steps = sorted(found)
    return np.array(steps, dtype=float), np.array([found[s] for s in steps], dtype=float)


def last_value(run: Run, name: str) -> Any:
    """The value of `name` in the last record that has one, or None."""
    return next(
        (r.values[name] for r in reversed(run.records) if r.values.get(name) is not None), None
    )


def block_states(run: Run) -> list[BlockState]:
    """Every recorded state of the search that has as many blocks as the last one, a step once."""
    states: dict[int, BlockState] = {}
    for record in run.records:
        pi = _probabilities(record.values.get("pi"))
        if pi is None:
            continue
        tau = number(record.values.get("tau"))
        earlier = states.get(record.step)
        if tau is None and earlier is not None:
            tau = earlier.tau
        states[record.step] = BlockState(record.step, pi, tau)
    ordered = [states[step] for step in sorted(states)]
    return [s for s in ordered if s.pi.shape == ordered[-1].pi.shape]


def _probabilities(value: Any) -> np.ndarray | None:
    """[num_blocks, 3] probabilities, or None if `value` is anything else."""
    try:
        pi = np.array(value, dtype=float)
    except (TypeError, ValueError):
        return None
    if pi.ndim != 2 or pi.shape[0] == 0 or pi.shape[1] != len(BRANCHES):
        return None
    # 1e-2 forgives values rounded for the file; anything further off is not a distribution.
    sums_to_one = np.all(np.abs(pi.sum(axis=1) - 1) < 1e-2)
    return pi if np.all(np.isfinite(pi)) and np.all(pi >= 0) and sums_to_one else None
