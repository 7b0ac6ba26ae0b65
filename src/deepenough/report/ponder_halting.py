"""The halting distribution pass by pass for chosen examples, with what would be answered at each.

Bars are the probability of halting at a pass, coloured by whether the answer there is right; the
line is how sure the model is of that answer, and the dashed mark is where it stops.
"""

from __future__ import annotations

import math
import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepenough.report import style
from deepenough.report.ponder_source import HaltingExample, halting_examples
from deepenough.report.source import Run

COLUMNS = 3
LINE_WIDTH = 46
MAX_LINES = 3
#: Letters of a text that fit the title beside its label, line ends in the wrong places included.
ROOM = LINE_WIDTH * MAX_LINES - 38


@style.styled
def draw_halting(run: Run) -> Figure | None:
    """One panel an example; None when none was recorded."""
    examples = halting_examples(run)
    if not examples:
        return None
    columns = min(COLUMNS, len(examples))
    rows = math.ceil(len(examples) / columns)
    figure = style.new_figure(3.7 * columns, 2.6 * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, example in zip(panels, examples, strict=False):
        _draw_example(axes, example)
    for axes in panels[len(examples) :]:
        axes.set_visible(False)
    for row in range(rows):
        panels[row * columns].set_ylabel("probability")
    figure.legend(
        handles=[
            Patch(color=style.BLUE, label="halting here, answer right"),
            Patch(color=style.VERMILION, label="halting here, answer wrong"),
            Line2D([], [], color=style.BLACK, marker=".", linewidth=1.0, label="certainty"),
            Line2D([], [], color=style.MUTED, linestyle="--", linewidth=1.0, label="stops"),
        ],
        loc="outside lower center",
        ncols=4,
    )
    return figure


def _draw_example(axes: Axes, example: HaltingExample) -> None:
    passes = np.arange(1, len(example.halting) + 1)
    right = [answer == example.label for answer in example.answers]
    colors = [style.BLUE if good else style.VERMILION for good in right]
    axes.bar(passes, example.halting, 0.7, color=colors)
    axes.plot(passes, example.confidence, color=style.BLACK, marker=".", linewidth=1.0)
    axes.axvline(example.passes + 0.5, color=style.MUTED, linestyle="--", linewidth=1.0)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlim(0.4, len(passes) + 0.6)
    axes.set_xticks(passes)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("pass")
    title = f"“{style.shown(example.text, ROOM)}” ({style.shown(example.label, 20)})"
    axes.set_title("\n".join(textwrap.wrap(title, LINE_WIDTH)), fontsize=style.SMALL_SIZE)
