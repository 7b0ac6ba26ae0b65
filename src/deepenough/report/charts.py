"""Lines, bars and points over a pair of axes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from deepenough.figure import GREY, Axis, Bars, Chart, Line, Panel, Scatter
from deepenough.report import style

# Inches of a chart, by the number of panels beside one another.
CHART_SIZES = {1: (7.2, 4.3), 2: (4.9, 3.6), 3: (3.7, 2.8)}
MAX_WIDTH = 16.0
BAR_SHARE = 0.8
#: A marker about this often along a line: more would hide it.
NUM_MARKERS = 16

#: A dark line with a light edge shows on bars of every colour.
_MARK: dict[str, Any] = {
    "color": style.INK,
    "linewidth": 2.0,
    "path_effects": [withStroke(linewidth=4.0, foreground="white")],
}


def chart_size(panel: Chart | Scatter, columns: int) -> tuple[float, float]:
    """Return the inches that a chart wants beside others; many bars or names want more."""
    if isinstance(panel, Scatter):
        return 7.6, min(8.0, 4.4 + 0.12 * max(0, len(panel.points) - 16))
    width, height = CHART_SIZES[min(columns, 3)]
    places = range(len(panel.categories))
    most = max((sum(b.values[i] is not None for b in panel.bars) for i in places), default=0)
    return min(max(width, 1.0 + len(places) * (0.12 + 0.32 * most)), MAX_WIDTH), height


def draw_chart(axes: Axes, chart: Chart, names: Sequence[str], width: float) -> None:
    """Draw lines, bars, rules and spans; `names` give the colours."""
    for span in chart.spans:
        axes.axvspan(span.low, span.high, color=style.YELLOW, alpha=0.18, linewidth=0)
        look: dict[str, Any] = {"fontsize": style.LABEL_SIZE, "color": style.MUTED, "va": "bottom"}
        axes.text(span.low, 0.02, f" {span.name}", transform=axes.get_xaxis_transform(), **look)
    for line in chart.lines:
        _draw_line(axes, line, names.index(line.name))
    for bars in chart.bars:
        _draw_bars(axes, chart, bars, names.index(bars.name))
    for rule in chart.rules:
        draw, dashes = (axes.axvline, "--") if rule.vertical else (axes.axhline, ":")
        look = {"color": style.MUTED, "linewidth": 1.1, "zorder": 3}
        draw(rule.value, linestyle=dashes, label=style.label(rule.name), **look)
    # A panel's title says what its vertical axis shows, where both would be the same words.
    set_axis(axes, "y", replace(chart.y, label="") if chart.y.label == chart.title else chart.y)
    set_axis(axes, "x", chart.x)
    if chart.bars:
        every = max(1, int(np.ceil(0.3 * len(chart.categories) / width)))
        places = range(0, len(chart.categories), every)
        axes.set_xticks(places, [style.drawable(chart.categories[place]) for place in places])
        axes.set_xlim(-0.6, len(chart.categories) - 0.4)
        axes.grid(axis="x", visible=False)


def _draw_line(axes: Axes, line: Line, index: int) -> None:
    place = index if line.color is None else line.color
    color = style.color(place)
    if line.low and line.high:
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    # With more names than colours, the second round is dashed.
    again = line.color is None and index >= len(style.PALETTE) and line.style == "solid"
    look: dict[str, Any] = {"linestyle": "--" if again else line.style}
    if line.marker:
        look |= {"marker": style.marker(place), "markersize": 4.4, "markeredgewidth": 0.4}
        look |= {"markeredgecolor": "white"}
        if line.style == "dotted":
            look |= {"markerfacecolor": "white", "markeredgecolor": color, "linewidth": 1.2}
        if line.style != "none":
            look["markevery"] = max(1, round(len(line.x) / NUM_MARKERS))
    elif place == GREY:
        look |= {"linewidth": 0.6, "alpha": 0.5}
    order = 2 if place == GREY else 4 if line.style == "none" else 3
    axes.plot(line.x, line.y, color=color, zorder=order, label=style.label(line.name), **look)


def _draw_bars(axes: Axes, chart: Chart, bars: Bars, index: int) -> None:
    """Draw the bars of one name; those that share a category divide its width."""
    color = style.color(index if bars.color is None else bars.color)
    label, mark_label = style.label(bars.name), style.label(chart.mark_name)
    for place, value in enumerate(bars.values):
        if value is None:
            continue
        here = [each for each in chart.bars if each.values[place] is not None]
        width = BAR_SHARE / len(here)
        x = place + (here.index(bars) + 0.5) * width - BAR_SHARE / 2
        look: dict[str, Any] = {"color": color}
        if place in bars.hatched:
            look = {"facecolor": "white", "edgecolor": color, "hatch": "////"}
        axes.bar(x, value, width=0.92 * width, zorder=2.5, label=label, **look)
        mark = bars.marks[place] if bars.marks else None
        if mark is not None:
            ends = x - 0.46 * width, x + 0.46 * width
            axes.plot(ends, [mark, mark], zorder=3, label=mark_label, **_MARK)
        if bars.texts:
            top = value if mark is None else max(value, mark)
            look = {"ha": "center", "va": "bottom", "fontsize": style.LABEL_SIZE}
            axes.annotate(bars.texts[place], (x, top), (0, 3), textcoords="offset points", **look)
    if bars.texts:
        axes.margins(y=0.1)


def draw_scatter(axes: Axes, panel: Scatter, names: Sequence[str]) -> None:
    """Draw points with their intervals, and a staircase through the optimal ones.

    A staircase, because nothing between two points has been measured: at a cost in between, the
    cheaper of the two is what one can have.
    """
    best = sorted((point for point in panel.points if point.optimal), key=lambda point: point.x)
    look: dict[str, Any] = {"color": style.FAINT, "linewidth": 1.4, "zorder": 1.5}
    look |= {"drawstyle": "steps-post", "label": "Pareto-optimal"}
    if best:
        axes.plot([p.x for p in best], [p.y for p in best], **look)
    for place, group in enumerate(names):
        own = [point for point in panel.points if point.group == group]
        x_ends = [(0 if p.x_low is None else p.x - p.x_low, (p.x_high or p.x) - p.x) for p in own]
        y_ends = [(0 if p.y_low is None else p.y - p.y_low, (p.y_high or p.y) - p.y) for p in own]
        look = {"color": style.color(place), "linestyle": "none", "elinewidth": 1.2}
        look |= {"marker": style.marker(place), "markersize": 6.5}
        look |= {"markeredgecolor": "white", "markeredgewidth": 0.7}
        look |= {"xerr": np.transpose(x_ends), "yerr": np.transpose(y_ends)}
        name = style.label(group or "measured")
        axes.errorbar([p.x for p in own], [p.y for p in own], label=name, **look)
    axes.margins(0.12)
    set_axis(axes, "x", panel.x)
    set_axis(axes, "y", panel.y)


def to_angle(value: Any) -> Any:
    """Return how far a squared cosine stands from 1, by the sine of its angle."""
    return 1.0 - np.sqrt(np.clip(1.0 - np.asarray(value), 0.0, 1.0))


def from_angle(place: Any) -> Any:
    """Invert `to_angle`."""
    return 1.0 - (1.0 - np.asarray(place)) ** 2


ANGLE_TICKS = (0.0, 0.5, 0.8, 0.9, 0.97, 0.99, 0.999, 1.0)


def set_axis(axes: Axes, which: str, spec: Axis) -> None:
    """Set label, scale, limits and ticks of the `x` or the `y` axis."""
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(style.drawable(spec.label))
    if spec.scale == "log":
        getattr(axes, f"set_{which}scale")("log", nonpositive="mask")
        axis.set_major_locator(ticker.LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
        axis.set_minor_formatter(ticker.NullFormatter())
    elif spec.scale == "angle":
        getattr(axes, f"set_{which}scale")("function", functions=(to_angle, from_angle))
        axis.set_major_locator(ticker.FixedLocator(ANGLE_TICKS))
    else:
        axis.set_major_locator(ticker.MaxNLocator(5 if which == "x" else 6, integer=spec.whole))
    getattr(axes, f"set_{which}lim")(spec.low, spec.high)
    percent = ticker.PercentFormatter(1.0)
    axis.set_major_formatter(percent if spec.percent else ticker.FuncFormatter(style.short_number))


#: Lengths in points (1/72 inch); a name on the first ring is plainly its marker's.
RINGS = (7.0, 14.0, 24.0, 36.0, 50.0, 66.0)
MARKER_RADIUS = 5.0
TIE = {"arrowstyle": "-", "color": style.FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
PLACES = [place for place in product(RINGS, (1, -1, 0), (1, -1, 0)) if any(place[1:])]
SIDES = {1: ("left", "bottom"), 0: ("center", "center"), -1: ("right", "top")}


def place_labels(axes: Axes, panel: Panel) -> None:
    """Write the names of points where they cover fewest others, if the panel has names.

    Each in turn, optimal points first, takes the nearest place of those that cover least; a name
    that moved away is tied to its point by a thin line. Limits and layout must stay afterwards.
    """
    named: list[tuple[tuple[float, float], str, bool]] = []
    if isinstance(panel, Scatter):
        named = [((p.x, p.y), style.label(p.name), bool(p.optimal)) for p in panel.points]
    elif isinstance(panel, Chart):
        named = [
            ((x, y), text, False)
            for line in panel.lines
            for x, y, text in zip(line.x, line.y, line.labels, strict=False)
        ]
    figure = axes.get_figure(root=True)
    assert figure is not None
    radius = MARKER_RADIUS * figure.dpi / 72
    markers = [axes.transData.transform(xy) for xy, _, _ in named]
    taken = [Bbox.from_extents(*(at - radius), *(at + radius)) for at in markers]
    for xy, text, optimal in sorted(named, key=lambda name: not name[2]):
        weight = "bold" if optimal else "normal"
        look: dict[str, Any] = {"fontsize": style.LABEL_SIZE, "fontweight": weight}
        look["path_effects"] = [withStroke(linewidth=2.0, foreground="white")]
        note = axes.annotate(
            text, xy, (0, 0), textcoords="offset points", zorder=4, annotation_clip=False, **look
        )
        if _place(note, axes.get_window_extent(), taken) > RINGS[0]:
            axes.annotate("", xy, note.xyann, textcoords="offset points", arrowprops=TIE)


def _place(note: Annotation, window: Bbox, taken: list[Bbox]) -> float:
    """Move a text to where it covers fewest of `taken`, add it to them and return its distance."""

    def move(place: tuple[float, int, int]) -> Bbox:
        ring, right, up = place
        note.xyann = (ring * right, ring * up)
        note.set(ha=SIDES[right][0], va=SIDES[up][1])
        return note.get_window_extent()

    def price(place: tuple[float, int, int]) -> int:
        box = move(place)
        inside = window.x0 <= box.x0 and box.x1 <= window.x1
        inside = inside and window.y0 <= box.y0 and box.y1 <= window.y1
        return box.count_overlaps(taken) + 10 * (not inside)

    best = min(PLACES, key=price)
    taken.append(move(best))
    return best[0]
