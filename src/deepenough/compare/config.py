"""What to compare, on what, at which operating points, and how to measure it."""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from deepenough.config import PlaceConfig, bounded, options
from deepenough.measurement import ComparedData
from deepenough.registry import METHODS


def _merged_grid() -> type:
    """Return one settings class with the operating points of all methods."""
    grids = [grid for method in METHODS if (grid := method.load("config", "GRID")) is not None]
    return dataclass(type("Grid", tuple(grids), {"__doc__": "Operating points to measure."}))


Grid: Any = _merged_grid()


@dataclass
class CompareConfig(PlaceConfig, ComparedData):
    """Settings of `deepenough compare`."""

    runs: list[str] = field(default_factory=list)
    """Folders of finished runs."""

    out: str = "runs/compare"
    """Folder for frontier.json and its pictures."""

    grid: Grid = field(default_factory=Grid)

    rounds: int = bounded(7, ge=1)
    """How often every point is timed; fewer than 6 give intervals of less than 95 %."""

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
