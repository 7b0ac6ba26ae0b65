"""Parity against difficulty: is the answer right, and how many passes did it take.

Difficulty is the number of entries that are not zero. What lies beyond the difficulties of training
is shaded: there a table of what was seen is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from deepenough.report import style
from deepenough.report.ponder_source import ParityBand, parity_bands
from deepenough.report.source import Run

MECHANISMS = {"ponder": "PonderNet", "act": "ACT", "fixed": "fixed depth"}
CHANCE = 0.5


@style.styled
def draw_parity(runs: Sequence[Run]) -> Figure | None:
    """Accuracy and passes of one run or of several; None when none has measured parity."""
    measured = [bands for bands in (parity_bands(run) for run in runs) if bands]
    if not measured:
        return None
    figure = style.new_figure(9.6, 3.9)
    left, right = figure.subplots(1, 2)
    names = _names([bands[0].mechanism for bands in measured])
    for index, (name, bands) in enumerate(zip(names, measured, strict=True)):
        middle = [(band.lowest + band.highest) / 2 for band in bands]
        look = {
            "color": style.CYCLE[index % len(style.CYCLE)],
            "marker": "osD^v"[index % 5],
            "markersize": 4.5,
            "label": name,
        }
        left.plot(middle, [band.accuracy for band in bands], **look)
        right.plot(middle, [band.passes for band in bands], **look)
    left.axhline(CHANCE, color=style.FAINT, linestyle=":", linewidth=1.0, label="chance")
    left.set_title("accuracy")
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_ylim(0.44, 1.02)
    right.set_title("passes")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("entries that are not zero")
        _shade_beyond(axes, measured[0])
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 0.12))
    return figure


def _names(mechanisms: Sequence[str]) -> list[str]:
    """What to call each run; a number tells apart runs of the same mechanism."""
    names: list[str] = []
    for mechanism in mechanisms:
        name = MECHANISMS.get(mechanism, style.shown(mechanism))
        seen = sum(known.split(" #")[0] == name for known in names)
        names.append(f"{name} #{seen + 1}" if seen else name)
    return names


def _shade_beyond(axes: Axes, bands: Sequence[ParityBand]) -> None:
    axes.set_xlim(bands[0].lowest - 0.5, bands[-1].highest + 0.5)
    beyond = [band for band in bands if band.beyond]
    if not beyond:
        return
    axes.axvspan(beyond[0].lowest - 0.5, beyond[-1].highest + 0.5, color=style.YELLOW, alpha=0.18,
                 linewidth=0)  # fmt: skip
    axes.text(beyond[0].lowest - 0.2, 0.03, "beyond training", transform=axes.get_xaxis_transform(),
              fontsize=style.LABEL_SIZE, color=style.MUTED, va="bottom")  # fmt: skip
