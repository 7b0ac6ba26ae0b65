"""Heat maps over pairs of layers: r^2 of the maps from layer to layer, and linear CKA.

The heat maps of "Jump to Conclusions" (arXiv 2303.09435). Notable choices:

- One scale from 0 to 1 for all panels, so that they can be compared. An r^2 below 0, worse than
  predicting the mean, is hatched instead of stretching the scale: `id` reaches -1000 at times, and
  how far below makes no difference.
- Where only the pairs with one layer are known, a heat map would be a single column; it becomes
  curves.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from deepenough.report import style
from deepenough.report.shortcut_look import headline, layer_ticks, mode_line, mode_name
from deepenough.report.shortcut_source import cka_table, r2_tables
from deepenough.report.source import Run

PANEL_INCHES = 3.7
BELOW_COLOR = "#DCDCDC"
BELOW_HATCH = "/////"


@style.styled
def draw_r2(run: Run) -> Figure | None:
    """r^2 from every layer to every later one, a panel a mode; None when none was measured."""
    found = r2_tables(run)
    if not found:
        return None
    # What the maps reach first, beside it what is reached without them.
    tables = {mode: found[mode] for mode in ("mat", "id") if mode in found} | found
    target = _only_target(tables)
    if target is not None:
        return _draw_to_one(run, tables, target, f"r² of layer {target}")
    figure = style.new_figure((PANEL_INCHES + 0.15) * len(tables) + 1.3, PANEL_INCHES + 1.05)
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (mode, table) in zip(panels, tables.items(), strict=True):
        image = _heat_map(axes, table)
        axes.set(title=mode_name(mode), xlabel="to layer")
    panels[0].set_ylabel("from layer")
    _add_scale(figure, image, panels[-1], "r²")
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    return figure


@style.styled
def draw_cka(run: Run) -> Figure | None:
    """Linear CKA between all pairs of layers; None when it was not measured."""
    table = cka_table(run)
    if table is None:
        return None
    upper = {"mat": np.where(np.tri(len(table), k=-1, dtype=bool), np.nan, table)}
    target = _only_target(upper)
    if target is not None:
        return _draw_to_one(run, upper, target, f"linear CKA with layer {target}")
    figure = style.new_figure(PANEL_INCHES + 1.45, PANEL_INCHES + 1.05)
    axes = figure.add_subplot()
    image = _heat_map(axes, table)
    axes.set(title="similarity of layers", xlabel="layer", ylabel="layer")
    _add_scale(figure, image, axes, "linear CKA")
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    return figure


def _heat_map(axes: Axes, table: np.ndarray) -> AxesImage:
    scale = matplotlib.colormaps[style.PROBABILITY_SCALE].with_extremes(
        under=BELOW_COLOR, bad="white"
    )
    image = axes.imshow(table, cmap=scale, vmin=0.0, vmax=1.0, interpolation="nearest")
    below = np.nan_to_num(table, nan=0.0) < 0
    if below.any():
        size = len(table)
        corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
        cells = [corners + np.array([to, start]) for start, to in np.argwhere(below)]
        hatched = PolyCollection(cells, hatch=BELOW_HATCH, facecolor="none", linewidth=0)
        hatched.set_edgecolor(style.FAINT)
        axes.add_collection(hatched, autolim=False)
        if np.isnan(np.tril(table, -1)[np.tril_indices(size, -1)]).all():
            mark = Patch(
                facecolor=BELOW_COLOR, hatch=BELOW_HATCH, edgecolor=style.FAINT, linewidth=0
            )
            axes.legend([mark], ["below 0"], loc="lower left")
    ticks = layer_ticks(len(table) - 1, PANEL_INCHES)
    axes.set(xticks=ticks, yticks=ticks)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2, color=style.FAINT)
    return image


def _add_scale(figure: Figure, image: AxesImage, axes: Axes, label: str) -> None:
    # Inside the panel's own space, so that it is as high as the panel whatever the layout does.
    place = axes.inset_axes((1.04, 0.0, 0.045, 1.0))
    bar = figure.colorbar(image, cax=place, ticks=np.linspace(0, 1, 6))
    bar.set_label(label)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _only_target(tables: Mapping[str, np.ndarray]) -> int | None:
    """The one layer that all maps lead to, the trivial ones of a layer to itself aside."""
    known = sum(np.isfinite(table).astype(int) for table in tables.values())
    assert isinstance(known, np.ndarray)
    np.fill_diagonal(known, 0)
    targets = np.flatnonzero(known.any(axis=0))
    return int(targets[0]) if len(targets) == 1 and len(known) > 2 else None


def _draw_to_one(run: Run, tables: Mapping[str, np.ndarray], target: int, label: str) -> Figure:
    figure = style.new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    lowest = 0.0
    for mode, table in tables.items():
        values = table[: target + 1, target]
        layers = np.flatnonzero(np.isfinite(values))
        axes.plot(layers, values[layers], label=mode_name(mode), **mode_line(mode, len(layers)))
        lowest = min(lowest, float(values[layers].min(initial=0.0)))
    # Far below 0 nothing is to be told apart, and the part above would become a flat line.
    axes.set_ylim(max(lowest - 0.05, -1.0), 1.03)
    axes.set(title=headline(run), xlabel="from layer", ylabel=label)
    axes.set_xticks(layer_ticks(target, 5.4))
    if len(tables) > 1:
        axes.legend(loc="best")
    return figure
