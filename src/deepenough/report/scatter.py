"""Quality against cost in matplotlib: points, intervals, and names that do not overlap.

The best points are joined by a staircase, because nothing between two points has been measured: at
a cost in between, the cheaper of the two is what one can have.

Names are placed greedily: each in turn takes, among places in rings around its point, the nearest
that covers no name, marker or line, or else the one that covers least. A name that moved away is
tied to its point by a thin line. Deterministic, and enough for some dozens of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from deepenough.figure import Point, Scatter, shortened
from deepenough.report import style

Segment = tuple[tuple[float, float], tuple[float, float]]

# Lengths are in points (1/72 inch), so that no choice depends on the resolution.

#: Rings of places around a marker; a label on the first is plainly its marker's and needs no tie.
RINGS = (6.5, 13.0, 22.0, 34.0, 48.0, 64.0, 84.0)
ANGLES = (45, 315, 0, 135, 225, 180, 90, 270, 22, 338, 158, 202, 68, 112, 248, 292)
MARKER_RADIUS = 4.5
LINE_RADIUS = 1.0
#: Kept free around a text: its size varies a little with the resolution.
GAP = 1.5
#: Leaving the axes is worse than covering a line or a name by as much.
OUTSIDE_PRICE = 10.0

_LINE: dict[str, Any] = {"color": style.FAINT, "linewidth": 1.4}
TIE = {"arrowstyle": "-", "color": style.FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
_MARKER: dict[str, Any] = {"markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.7}


def draw_scatter(panel: Scatter, heading: str) -> Figure:
    """Return the chart with every point named, the optimal ones in bold."""
    points = panel.points
    # Many names need room more than the points do.
    figure = style.new_figure(7.6, min(9.0, 5.0 + 0.12 * max(0, len(points) - 16)))
    axes = figure.add_subplot()
    groups = list(dict.fromkeys(point.group for point in points))
    best = sorted((point for point in points if point.optimal), key=lambda point: point.x)
    axes.plot([p.x for p in best], [p.y for p in best], drawstyle="steps-post", zorder=1.5, **_LINE)
    avoid: list[Segment] = []
    for a, b in pairwise(best):
        avoid += [((a.x, a.y), (b.x, a.y)), ((b.x, a.y), (b.x, b.y))]
    for point in points:
        avoid += _draw_point(axes, point, groups.index(point.group))
    axes.set(xlabel=style.drawable(panel.x.label), ylabel=style.drawable(panel.y.label))
    axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
    axes.margins(0.12)
    axes.set_title(heading)
    _add_legend(figure, groups)
    style.freeze_layout(figure)
    labels = [
        Label(p.x, p.y, style.drawable(shortened(p.name, 40)), important=p.optimal) for p in points
    ]
    place_labels(axes, labels, avoid)
    return figure


def _look(index: int) -> dict[str, Any]:
    place = index % len(style.PALETTE)
    return {"color": style.PALETTE[place], "marker": style.MARKERS[place]}


def _draw_point(axes: Axes, point: Point, group: int) -> list[Segment]:
    """Draw a point with its intervals and return the lines of these."""
    look = _look(group)
    lines: list[Segment] = []
    if point.y_low is not None and point.y_high is not None:
        lines.append(((point.x, point.y_low), (point.x, point.y_high)))
    if point.x_low is not None and point.x_high is not None:
        lines.append(((point.x_low, point.y), (point.x_high, point.y)))
    for (x0, y0), (x1, y1) in lines:
        axes.plot([x0, x1], [y0, y1], color=look["color"], linewidth=1.2, alpha=0.7, zorder=2.5)
    axes.plot([point.x], [point.y], linestyle="none", zorder=3, **look, **_MARKER)
    return lines


def _add_legend(figure: Figure, groups: Sequence[str]) -> None:
    handles = [Line2D([], [], **_LINE)]
    handles += [Line2D([], [], linestyle="none", **_look(i), **_MARKER) for i in range(len(groups))]
    names = ["Pareto-optimal", *(style.drawable(shortened(g, 24)) or "measured" for g in groups)]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5))


@dataclass(frozen=True)
class Label:
    """A text and the data point it names; important ones choose their place first."""

    x: float
    y: float
    text: str
    important: bool = False


def place_labels(axes: Axes, labels: Sequence[Label], avoid: Sequence[Segment] = ()) -> None:
    """Write the labels where they cover least; `avoid` are lines in data coordinates.

    Places are found for the present layout, so limits and layout must not change afterwards.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    points_per_pixel = 72.0 / figure.dpi

    def locate(xy: tuple[float, float]) -> np.ndarray:
        return np.asarray(axes.transData.transform(xy)) * points_per_pixel

    anchors = [locate((label.x, label.y)) for label in labels]
    taken = [_box(anchor, np.full(2, MARKER_RADIUS)) for anchor in anchors]
    for start, end in avoid:
        taken += _boxes_along(locate(start), locate(end))
    window = np.array(axes.get_window_extent().extents) * points_per_pixel
    for i in sorted(range(len(labels)), key=lambda i: not labels[i].important):
        look: dict[str, Any] = {"fontsize": style.LABEL_SIZE, "linespacing": 1.1}
        look["fontweight"] = "bold" if labels[i].important else "normal"
        half = _half_size(axes, labels[i].text, look) * points_per_pixel + GAP
        offset, ring = _best_place(anchors[i], half, np.array(taken), window)
        taken.append(_box(anchors[i] + offset, half))
        if ring:
            taken += _tie(anchors[i], offset)
            look["arrowprops"] = TIE
        axes.annotate(
            labels[i].text, (labels[i].x, labels[i].y), xytext=tuple(offset),
            textcoords="offset points", ha="center", va="center", zorder=4, annotation_clip=False,
            **look,
        )  # fmt: skip


def _half_size(axes: Axes, text: str, look: dict[str, Any]) -> np.ndarray:
    """Return half the width and height of a text, in pixels."""
    probe = axes.text(0, 0, text, **look)
    extent = probe.get_window_extent()
    probe.remove()
    return np.array([extent.width, extent.height]) / 2


def _best_place(
    anchor: np.ndarray, half: np.ndarray, taken: np.ndarray, window: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the nearest of the places that cover least: its offset from the anchor, its ring."""
    best_price, best_offset, best_ring = np.inf, np.zeros(2), 0
    for ring, distance in enumerate(RINGS):
        for angle in np.deg2rad(ANGLES):
            direction = np.array([np.cos(angle), np.sin(angle)])
            # The near edge or corner of the box is at the ring, whatever the length of the text.
            offset = distance * direction + half * direction / np.abs(direction).max()
            box = _box(anchor + offset, half)[None]
            price = _covered(box, taken)
            price += OUTSIDE_PRICE * (4 * half.prod() - _covered(box, window[None]))
            if ring:
                price += _covered(np.array(_tie(anchor, offset)), taken)
            # Less by more than rounding: of equal places the first stays, on every machine.
            if price < best_price - 1e-6:
                best_price, best_offset, best_ring = price, offset, ring
        if best_price < 1e-6:
            break
    return best_offset, best_ring


def _tie(anchor: np.ndarray, offset: np.ndarray) -> list[np.ndarray]:
    """Return the line from a point to its label, without what the marker covers."""
    skipped = min(1.0, 2 * MARKER_RADIUS / float(np.hypot(*offset)))
    return _boxes_along(anchor + skipped * offset, anchor + offset)


def _boxes_along(start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Return a line as a chain of small boxes: a slanted one must not block its rectangle."""
    num = max(2, int(np.hypot(*(end - start)) / (2 * LINE_RADIUS)) + 1)
    radius = np.full(2, LINE_RADIUS)
    return [_box(start + t * (end - start), radius) for t in np.linspace(0, 1, num)]


def _box(centre: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Return (left, bottom, right, top)."""
    return np.concatenate([centre - half, centre + half])


def _covered(boxes: np.ndarray, others: np.ndarray) -> float:
    """Return the area that boxes [n, 4] and others [m, 4] share, pair by pair."""
    a, b = boxes[:, None], others[None]
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    return float((width.clip(0) * height.clip(0)).sum())
