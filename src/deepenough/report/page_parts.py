"""What a report is made of: sections of figures as plain data, which the page draws itself.

A `Shown` is one figure: its kind (a function of `page_files/`), its texts, the command whose data
it shows, and the data. Nothing in it is markup, so nothing has to be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Fewer would not look like movement.
LEAST_PICTURES = 8


@dataclass(frozen=True)
class Limits:
    """How much of long data is shown; halved until a page is small enough."""

    frames: int = 150
    """Steps of a slider."""
    points: int = 300
    """Of one line."""
    tokens: int = 300
    """Of one text."""
    pictures: int = 60
    """Of a moving picture; with fewer than `LEAST_PICTURES` it is left out."""

    def halved(self) -> Limits:
        """The next smaller page."""
        pictures = self.pictures // 2
        return Limits(
            max(2, self.frames // 2),
            max(2, self.points // 2),
            max(1, self.tokens // 2),
            pictures if pictures >= LEAST_PICTURES else 0,
        )


@dataclass(frozen=True)
class Shown:
    """One figure."""

    kind: str
    title: str
    caption: str
    command: str
    data: dict[str, Any]
    wide: bool = False

    def thinned(self) -> list[str]:
        """What of its lines was left out, for each of them."""
        lines = [each for each in self.data.get("series", ()) if each.get("of", 0)]
        return [f"{len(each['x'])} of {each['of']} points of “{each['name']}”" for each in lines]


@dataclass
class Part:
    """What one method, or one comparison, gives to a report."""

    method: str = ""
    """As a heading says it: "PAR search", "Shortcuts"."""
    about: str = ""
    """What the reader should know first, a sentence or two."""
    summary: list[str] = field(default_factory=list)
    """The result in plain words, a sentence each."""
    figures: list[Shown] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)
    """What was left out to keep the page small."""


@dataclass(frozen=True)
class Section:
    """One run, or one comparison, of a report."""

    title: str
    part: Part
    folder: str = ""
    """Where the run stands, as it was given."""

    @property
    def short(self) -> str:
        """Enough for a link among others."""
        return self.title.partition(": ")[2].rpartition("/")[2] or self.title

    def thinned(self) -> list[str]:
        """All that was left out of it."""
        of_lines = [
            f"{text} in “{each.title}”" for each in self.part.figures for text in each.thinned()
        ]
        return [f"{self.title}: {text}" for text in (*self.part.thinned, *of_lines)]


def plain(values: Any, digits: int = 5) -> Any:
    """Numbers and arrays as JSON has them: rounded, and null for what is no number."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [plain(value, digits) for value in values]
    if isinstance(values, float):
        return float(f"{values:.{digits}g}") if math.isfinite(values) else None
    return values


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most so many, evenly, the first and the last always among them."""
    if len(items) <= limit:
        return list(items)
    picks = np.unique(np.linspace(0, len(items) - 1, limit).round().astype(int))
    return [items[i] for i in picks]


def line(name: str, xs: Any, ys: Any, limits: Limits, dashed: bool = False) -> dict[str, Any]:
    """One line of a chart, of so many points at most."""
    picks = thin(range(len(xs)), limits.points)
    kept: dict[str, Any] = {
        "name": name,
        "x": plain([float(xs[i]) for i in picks]),
        "y": plain([float(ys[i]) for i in picks]),
        "dashed": dashed,
    }
    return kept if len(picks) == len(xs) else kept | {"of": len(xs)}
