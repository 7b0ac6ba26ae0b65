"""The lens as a drawing: layers upwards, tokens to the right, a predicted word in every cell.

The shade is the probability of the word; bold words are the last layer's; the line in a column
lies under the first layer from which on they all are: there the model knows. The scale runs from
white to a light blue, unlike that of other probabilities here, because it is a ground for text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from deepenough.report import style
from deepenough.report.lens_source import Lens, lenses
from deepenough.report.lens_words import drawable, families, shorten
from deepenough.report.shortcut_look import mode_name
from deepenough.report.source import Run

#: From improbable to certain; black text has a contrast of 6:1 or more on all of it.
SHADES = ("#FFFFFF", "#4292C6")
KNOWN_COLOR = style.VERMILION

WORD_SIZE = 7.0
ROW_INCHES = 0.185
CELL_INCHES = (0.42, 0.92)
PADDING_INCHES = 0.06
MAX_WIDTH = 20.0
MAX_ROWS = 64
SIDES_INCHES = 1.5
ENDS_INCHES = 1.4

#: Width in inches of a text in bold or not.
Measure = Callable[[str, bool], float]


@style.styled
def draw_lens(run: Run) -> Figure | None:
    """The latest lens of a run, or None if it has none."""
    found = lenses(run)
    return lens_table(found[0]) if found else None


@style.styled
def lens_table(lens: Lens) -> Figure:
    """Draw one lens, of a long prompt its end, of a very deep model layers evenly."""
    lens = lens.some_layers(MAX_ROWS)
    lens = lens.last_tokens(int((MAX_WIDTH - SIDES_INCHES) / CELL_INCHES[0]))
    measure = _measure()
    cell = _cell_width(lens, measure)
    lens = lens.last_tokens(int((MAX_WIDTH - SIDES_INCHES) / cell))
    num_rows, num_tokens = lens.probability.shape
    width = max(6.4, SIDES_INCHES + cell * num_tokens)
    # A short prompt leaves room: its words need not be cut.
    cell = (width - SIDES_INCHES) / num_tokens
    figure = style.new_figure(width, ENDS_INCHES + ROW_INCHES * max(num_rows, 6))
    axes = figure.add_subplot()
    scale = LinearSegmentedColormap.from_list("lens", list(SHADES)).with_extremes(bad="white")
    image = axes.imshow(
        lens.probability, cmap=scale, vmin=0, vmax=1, aspect="auto", origin="lower",
        interpolation="nearest",
    )  # fmt: skip
    _write_words(axes, lens, cell, measure)
    _draw_known(axes, lens)
    _label_axes(axes, lens, cell, measure)
    bar = figure.colorbar(image, ax=axes, pad=0.012, fraction=0.03, aspect=28, ticks=[0, 0.5, 1])
    bar.set_label("probability of the word")
    bar.outline.set_visible(False)  # type: ignore[operator]
    figure.suptitle(
        _prompt(lens, width, measure), x=0.01, ha="left", fontsize=style.TITLE_SIZE,
        fontfamily=list(families()),
    )  # fmt: skip
    axes.set_title(_legend(lens), fontsize=style.SMALL_SIZE, color=style.MUTED)
    return figure


def _measure() -> Measure:
    figure = style.new_figure(1.0, 1.0)
    renderer = cast(FigureCanvasAgg, figure.canvas).get_renderer()

    @functools.cache
    def measure(text: str, bold: bool) -> float:
        weight = "bold" if bold else "normal"
        font = FontProperties(family=list(families()), weight=weight, size=WORD_SIZE)
        return renderer.get_text_width_height_descent(text, font, False)[0] / figure.dpi

    return measure


def _cell_width(lens: Lens, measure: Measure) -> float:
    """Wide enough for most words; the rare long one is cut."""
    widths = [
        measure(drawable(word[:80]), bool(lens.agrees[i, j]))
        for i, row in enumerate(lens.words)
        for j, word in enumerate(row)
    ]
    low, high = CELL_INCHES
    return float(np.clip(np.quantile(widths, 0.97) + PADDING_INCHES, low, high))


def _write_words(axes: Axes, lens: Lens, cell: float, measure: Measure) -> None:
    for (i, j), agrees in np.ndenumerate(lens.agrees):
        bold = bool(agrees)
        text = _cut(lens.words[i][j], cell, measure, bold)
        axes.text(
            j, i, text, ha="center", va="center_baseline", fontsize=WORD_SIZE,
            fontweight="bold" if bold else "normal", color=style.BLACK,
            fontfamily=list(families()), in_layout=False,
        )  # fmt: skip


def _cut(token: str, cell: float, measure: Measure, bold: bool) -> str:
    # Longer than any cell: not measured letter by letter.
    return shorten(
        drawable(token[:80]), lambda text: measure(text, bold) <= cell - PADDING_INCHES / 2
    )


def _draw_known(axes: Axes, lens: Lens) -> None:
    rows = lens.known_from()
    for token, row in enumerate(rows):
        # Known from the last layer alone says nothing.
        if row < len(lens.layers) - 1:
            axes.plot(
                [token - 0.46, token + 0.46], [row - 0.5, row - 0.5], color=KNOWN_COLOR,
                linewidth=1.8, solid_capstyle="butt", clip_on=False,
            )  # fmt: skip


def _label_axes(axes: Axes, lens: Lens, cell: float, measure: Measure) -> None:
    tokens = [_cut(token, cell, measure, False) for token in lens.tokens]
    axes.set_xticks(range(len(tokens)), tokens, fontsize=WORD_SIZE, fontfamily=list(families()))
    axes.set_yticks(range(len(lens.layers)), [str(layer) for layer in lens.layers])
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelsize=WORD_SIZE)
    axes.set(xlabel="token read", ylabel="layer")
    axes.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(-0.5, len(lens.layers) - 0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for edge in np.arange(0.5, len(tokens) - 1):
        axes.axvline(edge, color="white", linewidth=1.0)


def _prompt(lens: Lens, width: float, measure: Measure) -> str:
    room = (width - 0.3) * WORD_SIZE / style.TITLE_SIZE
    text = drawable(lens.prompt[:400]).replace("␣", " ")
    return shorten(text, lambda shorter: measure(shorter, False) <= room)


def _legend(lens: Lens) -> str:
    parts = [mode_name(lens.mode), "bold: the last layer's word", "line: every layer's from there"]
    if lens.first:
        total = lens.first + len(lens.tokens)
        parts.append(f"tokens {lens.first + 1} to {total} of {total}")
    return " · ".join(parts)
