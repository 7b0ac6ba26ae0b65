"""`frontier.json`, checked, and its pictures: quality against layers, FLOPs and milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.frontier import Point, draw_frontier
from deepenough.report.source import number

FILE = "frontier.json"
#: Key of a cost -> what an axis calls it, and by how much it is divided for that.
COSTS = {
    "layers": ("blocks run per {unit}", 1.0),
    "flops": ("million FLOPs per {unit}", 1e6),
    "milliseconds": ("milliseconds per {unit}", 1.0),
}
_NEEDED = ("quality", "quality_low", "quality_high", *COSTS)


@dataclass(frozen=True)
class Frontier:
    """A comparison as its file tells it."""

    name: str
    task: Mapping[str, Any]
    points: tuple[Mapping[str, Any], ...]
    content: Mapping[str, Any]
    """All of the file."""

    def name_of(self, row: Mapping[str, Any]) -> str:
        """What a point is called: with its run, where there are several."""
        name, run = str(row.get("name", "")), str(row.get("run", ""))
        several = len({point.get("run") for point in self.points}) > 1
        return f"{run} {name}".strip() if several else name or run

    @property
    def quality(self) -> str:
        return str(self.task.get("quality", "quality"))

    @property
    def higher_is_better(self) -> bool:
        return self.task.get("higher_is_better") is True

    @property
    def unit(self) -> str:
        return str(self.task.get("unit", "unit"))

    @property
    def title(self) -> str:
        parts = (self.task.get(name, "?") for name in ("kind", "data", "split"))
        return "{} of {} ({})".format(*parts)


def read_frontier(path: Path | str) -> Frontier:
    """The file, or the one in a folder; points that lack a number are left out."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: make it again with deepenough compare.") from error
    task = content.get("task") if isinstance(content, dict) else None
    rows = content.get("points") if isinstance(content, dict) else None
    if not isinstance(task, dict) or not isinstance(rows, list):
        raise UserError(f"{file} is no comparison: give what deepenough compare has written.")
    points = tuple(row for row in rows if isinstance(row, dict) and _complete(row))
    if not points:
        raise UserError(f"{file} has no point with quality and cost: compare again.")
    return Frontier(file.resolve().parent.name, task, points, content)


def _complete(row: Mapping[str, Any]) -> bool:
    return all(number(row.get(name)) is not None for name in _NEEDED)


def write_frontier_figures(frontier: Frontier, folder: Path | str) -> list[Path]:
    """One chart a cost, as PNG and PDF."""
    written: list[Path] = []
    for cost, (label, scale) in COSTS.items():
        points = [
            Point(
                name=frontier.name_of(row),
                x=row[cost] / scale,
                y=row["quality"],
                y_low=row["quality_low"],
                y_high=row["quality_high"],
                group=str(row.get("mechanism", "")),
            )
            for row in frontier.points
        ]
        figure = draw_frontier(
            points,
            title=frontier.title,
            x_label=label.format(unit=frontier.unit),
            y_label=frontier.quality,
            higher_is_better=frontier.higher_is_better,
        )
        written += style.save(figure, Path(folder) / f"frontier_{cost}")
    return written
