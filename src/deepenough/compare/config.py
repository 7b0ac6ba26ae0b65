"""What to compare, on what, at which operating points, and how to measure it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from deepenough.config import bounded, options, resolve
from deepenough.errors import UserError
from deepenough.measurement import ComparedData, ComparedRun
from deepenough.registry import METHODS


def _merged_grid() -> type:
    """Return one settings class with the operating points of all methods."""
    grids = [grid for method in METHODS if (grid := method.load("config", "GRID")) is not None]
    return dataclass(type("Grid", tuple(grids), {"__doc__": "Operating points to measure."}))


Grid: Any = _merged_grid()


@dataclass
class ComparisonEntry(ComparedRun):
    """A run of a comparison, as a settings file may describe it."""

    grid: Grid = field(default_factory=Grid)


@dataclass
class CompareConfig(ComparedData):
    """Settings of `deepenough compare`."""

    runs: list[str] = field(default_factory=list)
    """Folders of finished runs."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """Runs with more to say, in a settings file: each has a run and may have name, mechanisms,
    tuned, grid."""

    tuned: str | None = None
    """Generation: folder of deepenough decode tune for the same model; its drafts are measured."""

    out: str = "runs/compare"
    """Folder for frontier.json and its pictures."""

    grid: Grid = field(default_factory=Grid)
    """Operating points; each list is for the runs it fits, and one left out is chosen for them."""

    rounds: int = bounded(7, ge=1)
    """How often every point is timed; fewer than 6 give intervals of less than 95 %."""

    warmup: int = bounded(1, ge=1)
    """Passes before the first timed one."""

    threads: int | None = bounded(None, ge=1)
    """Threads of torch; by default its own choice."""

    seed: int = 0
    """Seed of the order in which points take turns."""

    count_flops: bool = True
    """Count FLOPs with torch's counter too, beside those of the traces: one more pass a point."""

    def command(self) -> str:
        """Return the command line that measures the same, however the settings were given."""
        words = ["deepenough", "compare", *self.runs]
        for option in options(CompareConfig):
            value: Any = self
            for name in option.name.split("."):
                value = getattr(value, name)
            if option.name != "runs" and value != option.default:
                spelt = json.dumps(value) if isinstance(value, list | bool) else str(value)
                words.append(f"--{option.name}={spelt}")
        return shlex.join(words)

    def all_entries(self) -> list[ComparisonEntry]:
        """Return every run to compare, each with the comparison's grid where it has none."""
        named = [ComparisonEntry(run) for run in self.runs]
        named += [resolve(ComparisonEntry, overrides=each) for each in self.entries]
        if not named:
            raise UserError(
                "There is nothing to compare: name the folders of finished runs, as in "
                "deepenough compare runs/first runs/second."
            )
        for entry in named:
            entry.tuned = entry.tuned or self.tuned
            for name, values in vars(self.grid).items():
                if getattr(entry.grid, name) is None:
                    setattr(entry.grid, name, values)
        return named
