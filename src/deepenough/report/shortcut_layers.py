"""Curves over layers: what a prediction from each layer shares with the model's own.

Precision@k and surprisal as in "Jump to Conclusions" (arXiv 2303.09435), and the KL divergence: one
picture for the ways to jump from a layer to the last one, one for blocks whose attention,
feed-forward or norms are replaced from a layer on, with `mat` and `id` for comparison. A divergence
of `id` can be a hundred times that of a map: then the scale is logarithmic and ends above
zero, which a curve then reaches outside the panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from deepenough.report import style
from deepenough.report.shortcut_look import headline, layer_ticks, mode_line, mode_name
from deepenough.report.shortcut_source import SUBMODULES, Points, layer_curves
from deepenough.report.source import Run

COLUMNS = 3
PANEL_WIDTH = 3.4
PANEL_HEIGHT = 2.7
#: A quantity that reaches this many times its median needs a logarithmic scale to be seen whole.
LOG_SCALE_FACTOR = 10.0
#: Less than this many nats is as good as none, and would stretch that scale down without end.
LEAST_NATS = 0.01


@dataclass(frozen=True)
class Panel:
    """One quantity: the name it is recorded under, its title, and its greatest value if it has."""

    name: str
    title: str
    high: float | None = None


PANELS = (
    Panel("precision_1", "precision@1", high=1.0),
    Panel("precision_5", "precision@5", high=1.0),
    Panel("precision_10", "precision@10", high=1.0),
    Panel("surprisal", "surprisal (nats)"),
    Panel("kl", "KL to the last layer (nats)"),
)


@style.styled
def draw_layers(run: Run) -> Figure | None:
    """Every way to jump to the last layer; None when none was measured."""
    return _draw(run, lambda mode: mode not in SUBMODULES, from_label="prediction from layer")


@style.styled
def draw_submodules(run: Run) -> Figure | None:
    """Parts of the blocks replaced by linear maps; None when none was measured."""
    if not any(mode in SUBMODULES for panel in PANELS for mode in layer_curves(run, panel.name)):
        return None
    compared = ("id", "mat", *SUBMODULES)
    return _draw(run, lambda mode: mode in compared, from_label="replaced from layer")


def _draw(run: Run, wanted: Callable[[str], bool], from_label: str) -> Figure | None:
    drawn: dict[Panel, dict[str, Points]] = {}
    for panel in PANELS:
        curves = {m: points for m, points in layer_curves(run, panel.name).items() if wanted(m)}
        if curves:
            drawn[panel] = curves
    if not drawn:
        return None
    num_columns = min(COLUMNS, len(drawn))
    num_rows = -(-len(drawn) // num_columns)
    figure = style.new_figure(max(PANEL_WIDTH * num_columns, 5.6), PANEL_HEIGHT * num_rows + 0.9)
    places = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, (panel, curves) in zip(places, drawn.items(), strict=False):
        _draw_panel(axes, panel, curves)
        axes.set_xlabel(from_label)
    spare = places[len(drawn) :]
    for axes in spare:
        axes.axis("off")
    modes = list(dict.fromkeys(mode for curves in drawn.values() for mode in curves))
    _add_legend(figure, spare, modes)
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    return figure


def _draw_panel(axes: Axes, panel: Panel, curves: Mapping[str, Points]) -> None:
    axes.set_title(panel.title, fontsize=style.TEXT_SIZE)
    for mode, (layers, values) in curves.items():
        axes.plot(layers, values, **mode_line(mode, len(layers)))
    last = int(max(layers.max() for layers, _ in curves.values()))
    axes.set_xticks(layer_ticks(last, PANEL_WIDTH - 0.7))
    values = np.concatenate([values for _, values in curves.values()])
    if panel.high is not None:
        axes.set_ylim(0.0, panel.high * 1.03)
    elif values.max() > LOG_SCALE_FACTOR * max(np.median(values), LEAST_NATS):
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(bottom=max(LEAST_NATS, float(values.min())))
        axes.yaxis.set_major_formatter(FuncFormatter(style.short_number))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        # Rounding may leave a divergence of zero a little below it.
        axes.set_ylim(bottom=0.0 if values.min() > -1e-3 else None)


def _add_legend(figure: Figure, spare: Sequence[Axes], modes: Sequence[str]) -> None:
    """In the free place of the grid if there is one, else below it."""
    handles = [Line2D([], [], **mode_line(mode)) for mode in modes]
    names = [mode_name(mode) for mode in modes]
    if spare:
        spare[0].legend(handles, names, loc="center", fontsize=style.TEXT_SIZE, labelspacing=0.8)
    else:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(modes), COLUMNS))
