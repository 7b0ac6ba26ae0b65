"""Quality against cost: every model a point, the best ones joined by a step line.

A point is Pareto-optimal when no other is at least as good in both and better in one. The line is
a staircase because nothing between two points has been measured: at a cost in between, the
cheaper of the two is what one can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.labels import Label, Segment, place_labels
from deepenough.report.source import number

#: The groups that have a look of their own; any other takes the next free one of `OTHER_LOOKS`.
GROUP_LOOKS = {
    "searched": (style.BLUE, "o"),
    "hand-written": (style.ORANGE, "s"),
    "baseline": (style.BLACK, "D"),
}
OTHER_LOOKS = (
    (style.GREEN, "^"), (style.VERMILION, "v"), (style.PURPLE, "P"), (style.SKY, "X"),
    (style.BLACK, "D"), (style.BLUE, "o"), (style.ORANGE, "s"),
)  # fmt: skip
LINE_LOOK: dict[str, Any] = {"color": style.FAINT, "linewidth": 1.4}
MARKER_LOOK: dict[str, Any] = {
    "markersize": 6.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.7,
}


@dataclass(frozen=True)
class Point:
    """One model on the chart."""

    name: str
    x: float
    y: float
    y_low: float
    y_high: float
    pattern: str = ""
    group: str = ""


def read_point(row: Mapping[str, Any], x: str, y: str) -> Point:
    """A row of results as a point.

    `row[x]` and `row[y]` are a number, or several, one a seed: their mean is shown, and from the
    least to the greatest `y` is the spread. Where present, `<y>_low` and `<y>_high` are the spread.
    """
    name = str(row.get("name") or row.get("pattern") or "?")
    xs, ys = _numbers(row, x, name), _numbers(row, y, name)
    low, high = number(row.get(f"{y}_low")), number(row.get(f"{y}_high"))
    return Point(
        name=name,
        x=float(np.mean(xs)),
        y=float(np.mean(ys)),
        y_low=min(ys) if low is None else low,
        y_high=max(ys) if high is None else high,
        pattern=str(row.get("pattern") or ""),
        group=str(row.get("group") or ""),
    )


def _numbers(row: Mapping[str, Any], key: str, name: str) -> list[float]:
    value = row.get(key)
    many = value if isinstance(value, (list, tuple)) else [value]
    numbers = [n for n in map(number, many) if n is not None]
    if not numbers or len(numbers) != len(many):
        raise UserError(
            f"The point {style.shown(name)!r} has no finite number for {key!r} ({value!r}); "
            "give one number, or a list with one a seed."
        )
    return numbers


def pareto(xy: Sequence[tuple[float, float]], *, higher_is_better: bool = False) -> list[int]:
    """Indices of the optimal points (less x is better, and less y unless told), by rising x.

    Equal points are optimal together.
    """
    sign = -1.0 if higher_is_better else 1.0
    order = sorted(range(len(xy)), key=lambda i: (xy[i][0], sign * xy[i][1]))
    optimal: list[int] = []
    for i in order:
        # Sorted by cost, a point is beaten exactly when the best before it is as good or better.
        if not optimal or xy[i] == xy[optimal[-1]] or sign * xy[i][1] < sign * xy[optimal[-1]][1]:
            optimal.append(i)
    return optimal


def plot_frontier(
    points: Sequence[Mapping[str, Any]],
    path: Path | str,
    x: str = "relative_time",
    y: str = "perplexity",
    *,
    title: str = "",
    x_label: str | None = None,
    y_label: str | None = None,
    higher_is_better: bool = False,
) -> list[Path]:
    """Draw the points, each a row as `read_point` reads it, into `<path>.png` and `<path>.pdf`."""
    figure = draw_frontier(
        [read_point(row, x, y) for row in points],
        title=title,
        x_label=x_label or x.replace("_", " "),
        y_label=y_label or y.replace("_", " "),
        higher_is_better=higher_is_better,
    )
    return style.save(figure, path)


@style.styled
def draw_frontier(
    points: Sequence[Point],
    *,
    title: str = "",
    x_label: str,
    y_label: str,
    higher_is_better: bool = False,
) -> Figure:
    """The chart as a figure."""
    if not points:
        raise UserError("There is no point to draw on the frontier; give at least one result.")
    # Many names need room more than the points do.
    figure = style.new_figure(7.6, min(9.0, 5.0 + 0.12 * max(0, len(points) - 16)))
    axes = figure.add_subplot()
    optimal = pareto([(p.x, p.y) for p in points], higher_is_better=higher_is_better)
    line = _draw_line(axes, [points[i] for i in optimal])
    groups = list(dict.fromkeys(p.group for p in points))
    looks = _looks(groups)
    for group in groups:
        _draw_group(axes, [p for p in points if p.group == group], *looks[group])
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.margins(0.12)
    if title:
        axes.set_title(style.shown(title, 80))
    _add_legend(figure, looks)
    style.freeze_layout(figure)
    best = {id(points[i]) for i in optimal}
    labels = [Label(p.x, p.y, _label_text(p), important=id(p) in best) for p in points]
    bars = [((p.x, p.y_low), (p.x, p.y_high)) for p in points if p.y_high > p.y_low]
    place_labels(axes, labels, avoid=[*line, *bars])
    return figure


def _draw_line(axes: Axes, best: Sequence[Point]) -> list[Segment]:
    """Draw the staircase through the optimal points and return its segments."""
    axes.plot(
        [p.x for p in best], [p.y for p in best], drawstyle="steps-post",
        zorder=1.5, **LINE_LOOK,
    )  # fmt: skip
    segments: list[Segment] = []
    for a, b in pairwise(best):
        segments += [((a.x, a.y), (b.x, a.y)), ((b.x, a.y), (b.x, b.y))]
    return segments


def _looks(groups: Sequence[str]) -> dict[str, tuple[str, str]]:
    others = [g for g in groups if g not in GROUP_LOOKS]
    spare = {g: OTHER_LOOKS[i % len(OTHER_LOOKS)] for i, g in enumerate(others)}
    return {g: GROUP_LOOKS.get(g) or spare[g] for g in groups}


def _draw_group(axes: Axes, points: Sequence[Point], color: str, marker: str) -> None:
    ys = np.array([p.y for p in points])
    spread = np.abs([[p.y_low for p in points] - ys, [p.y_high for p in points] - ys])
    axes.errorbar(
        [p.x for p in points], ys, yerr=spread if spread.any() else None, fmt=marker, color=color,
        elinewidth=1.2, capsize=2.5, zorder=3, **MARKER_LOOK,
    )  # fmt: skip


def _add_legend(figure: Figure, looks: Mapping[str, tuple[str, str]]) -> None:
    entries = [(Line2D([], [], **LINE_LOOK), "Pareto-optimal")]
    for group, (color, marker) in looks.items():
        mark = Line2D([], [], color=color, marker=marker, linestyle="none", **MARKER_LOOK)
        entries.append((mark, style.shown(group, 24) if group else "measured"))
    handles, texts = zip(*entries, strict=True)
    figure.legend(handles, texts, loc="outside upper right", ncols=min(len(entries), 5))


def _label_text(point: Point) -> str:
    name = style.shown(point.name, 28)
    pattern = style.shown(point.pattern, 28)
    return name if not pattern or pattern == name else f"{name}\n{pattern}"
