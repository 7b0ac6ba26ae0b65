"""Early exit: how many layers are saved, and how often the word stays the last layer's.

The left panel has one curve a mode over the thresholds of "Jump to Conclusions" (arXiv 2303.09435)
and, hollow, the same for leaving at one fixed layer always: only the distance between the two is
due to the confidence. The right panel reads both off at three levels of agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from deepenough.report import style
from deepenough.report.shortcut_look import headline, mode_color, mode_line, mode_name
from deepenough.report.shortcut_source import (
    Points,
    Values,
    exit_curves,
    fixed_exit_curves,
    measured,
    share,
)
from deepenough.report.source import Run

FIXED_LOOK: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "none", "linewidth": 1.1}
BAR_SHARE = 0.8
LEGEND_COLUMN_INCHES = 1.9
#: A dark line with a light edge shows on bars of every colour.
FIXED_MARK: dict[str, Any] = {
    "color": style.INK,
    "linewidth": 2.0,
    "path_effects": [withStroke(linewidth=4.0, foreground="white")],
}


@style.styled
def draw_exit(run: Run) -> Figure | None:
    """Both panels, or the one there are measurements for; None for a run without a sweep."""
    curves = exit_curves(run)
    read_off = {mode: at for mode, at in measured(run, "saved", "agreement").items() if at}
    if not curves and not read_off:
        return None
    widths = [5.6] * bool(curves) + [_bars_width(read_off)] * bool(read_off)
    figure = style.new_figure(sum(widths), 4.7)
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    fixed = {m: points for m, points in fixed_exit_curves(run).items() if m in curves}
    if curves:
        _draw_curves(panels[0], curves, fixed)
    if read_off:
        _draw_bars(panels[-1], read_off)
    modes = list(dict.fromkeys([*curves, *read_off]))
    _add_legend(figure, modes, has_fixed=bool(fixed), has_bars=bool(read_off))
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    return figure


def _bars_width(read_off: Mapping[str, Mapping[float, Values]]) -> float:
    """Inches for bars that are wide enough for the number above them."""
    levels = {level for by_level in read_off.values() for level in by_level}
    return max(3.6, 0.4 + len(levels) * (0.3 + 0.45 * len(read_off)))


def _draw_curves(axes: Axes, curves: Mapping[str, Points], fixed: Mapping[str, Points]) -> None:
    for mode, (saved, agreement) in fixed.items():
        look = mode_line(mode, len(saved)) | FIXED_LOOK | {"markeredgecolor": mode_color(mode)}
        axes.plot(saved, agreement, zorder=2, **look)
    for mode, (saved, agreement) in curves.items():
        axes.plot(saved, agreement, zorder=3, **(mode_line(mode, len(saved))))
    axes.set(xlabel="layers saved", ylabel="agreement with the last layer")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(top=1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_bars(axes: Axes, read_off: Mapping[str, Mapping[float, Values]]) -> None:
    levels = sorted({level for by_level in read_off.values() for level in by_level})
    width = BAR_SHARE / len(read_off)
    for i, (mode, by_level) in enumerate(read_off.items()):
        places = np.arange(len(levels)) + (i + 0.5) * width - BAR_SHARE / 2
        for x, level in zip(places, levels, strict=True):
            values = by_level.get(level, {})
            saved, fixed = share(values.get("saved")), share(values.get("fixed_layer_saved"))
            axes.bar(x, saved or 0.0, width=0.92 * width, color=mode_color(mode))
            if fixed is not None:
                axes.plot([x - 0.46 * width, x + 0.46 * width], [fixed, fixed], **FIXED_MARK)
            text = "–" if saved is None else f"{100 * saved:.1f}"
            top = max(saved or 0.0, fixed or 0.0)
            axes.annotate(
                text, (x, top), (0, 3), textcoords="offset points", ha="center", va="bottom",
                fontsize=style.LABEL_SIZE,
            )  # fmt: skip
    axes.set_xticks(range(len(levels)), [f"{100 * level:.4g}%" for level in levels])
    axes.set(xlabel="agreement kept", ylabel="layers saved")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(y=0.12)
    # Where nothing is saved, noise must not fill the panel.
    axes.set_ylim(0.0, max(0.1, axes.get_ylim()[1]))
    axes.grid(axis="x", visible=False)


def _add_legend(figure: Figure, modes: Sequence[str], *, has_fixed: bool, has_bars: bool) -> None:
    entries = [(Line2D([], [], **mode_line(mode)), mode_name(mode)) for mode in modes]
    grey: dict[str, Any] = {"color": style.MUTED, "marker": "o", "markersize": 4.2}
    if has_fixed:
        entries.append((Line2D([], [], **grey), "exit when sure enough"))
        entries.append((Line2D([], [], **(grey | FIXED_LOOK)), "exit at one layer always"))
    if has_bars:
        text = "the same among the bars" if has_fixed else "exit at one layer always"
        entries.append((Line2D([], [], **FIXED_MARK), text))
    handles, names = zip(*entries, strict=True)
    num_columns = int(figure.get_figwidth() / LEGEND_COLUMN_INCHES)
    figure.legend(handles, names, loc="outside lower center", ncols=min(num_columns, 4))
