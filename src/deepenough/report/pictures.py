"""Pictures that are not charts: texts with shaded tokens, the lens, and block diagrams.

In a diagram attention is a rounded box, dense an angular one, identity a dashed one; shape and
colour say the same thing twice, for readers who see only one of them.

In a lens, layers go upwards and tokens to the right. The shade is the probability of the predicted
token; bold predictions are the last layer's; the line in a column lies under the first layer from
which on they all are. The scale runs from white to a light blue, because it is a ground for text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from deepenough.figure import Diagram, LensTable, TokenText
from deepenough.report import style

#: Width in inches of a text in bold or not.
Measure = Callable[[str, bool], float]

TEXT_WIDTH = 9.0
MAX_LINES = 60
LINE_INCHES = 0.24

CELL_TEXT_SIZE = 7.0
ROW_INCHES = 0.185
CELL_INCHES = (0.42, 0.92)
PADDING_INCHES = 0.06
MAX_WIDTH = 20.0
MAX_ROWS = 64
SIDES_INCHES = 1.5
ENDS_INCHES = 1.4

# One unit of a diagram is one inch, so text and boxes keep their proportion in every figure.
MAX_PER_ROW = 12
STEP = 1.0
BOX_WIDTH = 0.74
BOX_HEIGHT = 0.62
ROW_HEIGHT = 1.2
HEADER = 0.72
MARGIN = 0.22
MIN_WIDTH = 6.2
ARROW = {"arrowstyle": "-|>", "color": style.INK, "shrinkA": 0, "shrinkB": 0}


def measure_in(size: float) -> Measure:
    """Return a function that measures texts of that size in the fonts of the figures."""
    figure = style.new_figure(1.0, 1.0)
    renderer = cast(FigureCanvasAgg, figure.canvas).get_renderer()

    @functools.cache
    def measure(text: str, bold: bool) -> float:
        weight = "bold" if bold else "normal"
        font = FontProperties(family=list(style.families()), weight=weight, size=size)
        return renderer.get_text_width_height_descent(text, font, False)[0] / figure.dpi

    return measure


def shorten(text: str, fits: Callable[[str], bool]) -> str:
    """Return the longest beginning of `text` that fits, an ellipsis in place of the rest."""
    if fits(text):
        return text
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(f"{text[:middle]}…") else (low, middle - 1)
    return f"{text[:low]}…"


# -- texts ------------------------------------------------------------------------------------


def draw_tokens(panel: TokenText, heading: str) -> Figure:
    """Return a text whose tokens are shaded by depth; of a very long one the beginning."""
    measure = measure_in(style.TEXT_SIZE)
    scale = matplotlib.colormaps[style.COLOR_SCALE]
    x, line, places = 0.0, 0, []
    for token, depth in zip(panel.tokens, panel.depth, strict=True):
        text = shorten(style.drawable(token), lambda part: measure(part, False) < TEXT_WIDTH - 0.6)
        # A space at either end is not measured by the renderer but takes room.
        width = measure(f"|{text}|", False) - measure("||", False) + PADDING_INCHES
        if x + width > TEXT_WIDTH - 0.3 and x > 0:
            x, line = 0.0, line + 1
        if line >= MAX_LINES:
            break
        places.append((x, line, width, text, depth))
        x += width + 0.02
    top = 0.5
    height = top + LINE_INCHES * (line + 1) * 1.15 + 0.75
    figure = style.new_figure(TEXT_WIDTH, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, TEXT_WIDTH), ylim=(height, 0))
    axes.axis("off")
    title = panel.title or heading
    axes.text(0.15, 0.25, shorten(style.drawable(title), lambda t: len(t) < 100), va="center",
              fontsize=style.TITLE_SIZE)  # fmt: skip
    for x, line, width, text, depth in places:
        y = top + (line + 0.5) * LINE_INCHES * 1.15
        ink = style.BLACK
        if depth is not None:
            color = scale(depth / panel.last)
            ink = style.ink_on(color)
            box = (0.15 + x, y - LINE_INCHES / 2), width, LINE_INCHES
            axes.add_patch(Rectangle(*box, facecolor=color, linewidth=0))
        axes.text(0.15 + x + PADDING_INCHES / 2, y, text, va="center", color=ink)
    place = figure.add_axes((0.15 / TEXT_WIDTH, 0.38 / height, 2.4 / TEXT_WIDTH, 0.1 / height))
    norm = matplotlib.colors.Normalize(0, panel.last)
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(norm, scale), place, orientation="horizontal"
    )
    bar.outline.set_visible(False)  # type: ignore[operator]
    axes.text(2.75, height - 0.43, panel.depth_name, va="center", color=style.MUTED)
    return figure


# -- the lens ---------------------------------------------------------------------------------


def draw_lens(panel: TokenText, lens: LensTable) -> Figure:
    """Return the table of a lens: of a long prompt its end, of a very deep model some layers."""
    measure = measure_in(CELL_TEXT_SIZE)
    panel = panel.last_tokens(int((MAX_WIDTH - SIDES_INCHES) / CELL_INCHES[0]))
    cell = _cell_width(panel, measure)
    panel = _some_layers(panel.last_tokens(int((MAX_WIDTH - SIDES_INCHES) / cell)))
    assert panel.lens is not None
    lens = panel.lens
    num_rows, num_tokens = len(lens.layers), len(panel.tokens)
    width = max(6.4, SIDES_INCHES + cell * num_tokens)
    # A short prompt leaves room: its texts need not be cut.
    cell = (width - SIDES_INCHES) / num_tokens
    figure = style.new_figure(width, ENDS_INCHES + ROW_INCHES * max(num_rows, 6))
    axes = figure.add_subplot()
    scale = LinearSegmentedColormap.from_list("lens", list(style.TEXT_SHADES))
    image = axes.imshow(
        np.array(lens.probability, dtype=float), cmap=scale.with_extremes(bad="white"), vmin=0,
        vmax=1, aspect="auto", origin="lower", interpolation="nearest",
    )  # fmt: skip
    for i, row in enumerate(lens.predictions):
        for j, text in enumerate(row):
            bold = lens.agrees[i][j]
            axes.text(j, i, _cut(text, cell, measure, bold), ha="center", va="center_baseline",
                      fontsize=CELL_TEXT_SIZE, fontweight="bold" if bold else "normal",
                      color=style.BLACK, in_layout=False)  # fmt: skip
    _draw_known(axes, panel, lens)
    tokens = [_cut(token.replace(" ", "␣"), cell, measure, False) for token in panel.tokens]
    axes.set_xticks(range(num_tokens), tokens, fontsize=CELL_TEXT_SIZE)
    axes.set_yticks(range(num_rows), [str(layer) for layer in lens.layers])
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelsize=CELL_TEXT_SIZE)
    axes.set(xlabel="token read", ylabel="layer")
    axes.set(xlim=(-0.5, num_tokens - 0.5), ylim=(-0.5, num_rows - 0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for edge in range(1, num_tokens):
        axes.axvline(edge - 0.5, color="white", linewidth=1.0)
    bar = figure.colorbar(image, ax=axes, pad=0.012, fraction=0.03, aspect=28, ticks=[0, 0.5, 1])
    bar.set_label("probability of the prediction")
    bar.outline.set_visible(False)  # type: ignore[operator]
    figure.suptitle(style.drawable(panel.title), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    legend = ["bold: the last layer's prediction", "line: every layer above predicts the same"]
    if panel.first:
        total = panel.first + num_tokens
        legend.append(f"tokens {panel.first + 1} to {total} of {total}")
    axes.set_title(" · ".join(legend), fontsize=style.SMALL_SIZE, color=style.MUTED)
    return figure


def _some_layers(panel: TokenText) -> TokenText:
    """Return the same with at most `MAX_ROWS` layers, evenly, both ends among them."""
    lens = panel.lens
    assert lens is not None
    num = len(lens.layers)
    picks = np.unique(np.linspace(0, num - 1, min(MAX_ROWS, num)).round().astype(int)).tolist()
    lens = LensTable(
        [lens.layers[i] for i in picks],
        [lens.predictions[i] for i in picks],
        [lens.probability[i] for i in picks],
        [lens.agrees[i] for i in picks],
    )
    return replace(panel, lens=lens)


def _cell_width(panel: TokenText, measure: Measure) -> float:
    """Return inches that are enough for most predictions; the rare long one is cut."""
    assert panel.lens is not None
    widths = [
        measure(style.drawable(text[:80]), bold)
        for texts, agrees in zip(panel.lens.predictions, panel.lens.agrees, strict=True)
        for text, bold in zip(texts, agrees, strict=True)
    ]
    low, high = CELL_INCHES
    return float(np.clip(np.quantile(widths, 0.97) + PADDING_INCHES, low, high))


def _cut(text: str, cell: float, measure: Measure, bold: bool) -> str:
    # What is longer than any cell is not measured letter by letter.
    room = cell - PADDING_INCHES / 2
    return shorten(style.drawable(text[:80]), lambda part: measure(part, bold) <= room)


def _draw_known(axes: Axes, panel: TokenText, lens: LensTable) -> None:
    for token, depth in enumerate(panel.depth):
        row = next((i for i, layer in enumerate(lens.layers) if layer >= (depth or 0)), 0)
        # Known from the last layer alone says nothing.
        if row < len(lens.layers) - 1:
            axes.plot([token - 0.46, token + 0.46], [row - 0.5, row - 0.5], color=style.VERMILION,
                      linewidth=1.8, solid_capstyle="butt", clip_on=False)  # fmt: skip


# -- diagrams ---------------------------------------------------------------------------------


def draw_diagram(panel: Diagram, heading: str) -> Figure:
    """Return the blocks from the input to the output; long patterns wrap to rows."""
    ends = [("text", "tokens")], [("text", "next\ntoken")]
    blocks = [*ends[0], *((kind, kind) for kind in panel.blocks), *ends[1]]
    num_rows = -(-len(blocks) // MAX_PER_ROW)
    per_row = -(-len(blocks) // num_rows)
    width = max(per_row * STEP + 2 * MARGIN, MIN_WIDTH)
    height = HEADER + num_rows * ROW_HEIGHT
    figure = style.new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    for y, size, text, color in (
        (height - 0.3, style.TITLE_SIZE, heading, style.INK),
        (height - 0.56, style.TEXT_SIZE, style.drawable(panel.facts), style.MUTED),
    ):
        measure = measure_in(size)
        fitting = shorten(text, lambda part, m=measure: m(part, False) < width - 2 * MARGIN)  # type: ignore[misc]
        axes.text(MARGIN, y, fitting, fontsize=size, color=color, va="center")
    for i, (kind, label) in enumerate(blocks):
        row, column = divmod(i, per_row)
        x, y = MARGIN + (column + 0.5) * STEP, height - HEADER - (row + 0.5) * ROW_HEIGHT
        number = i if 0 < i <= len(panel.blocks) else None
        _draw_block(axes, kind, label, number, x, y)
        if i:
            # Into the first block of a row the arrow comes from the margin.
            start, end = x - STEP + BOX_WIDTH / 2, x - BOX_WIDTH / 2
            axes.annotate("", (end, y), (start, y), arrowprops=ARROW)
    return figure


def _draw_block(axes: Axes, kind: str, label: str, number: int | None, x: float, y: float) -> None:
    corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
    look: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 1.1, "facecolor": "white"}
    shape: Patch | None = None
    if kind == "attention":
        # The padding of a FancyBboxPatch is outside its box; zero keeps it the size of the others.
        rounded = "round,pad=0,rounding_size=0.24"
        look["facecolor"] = style.BRANCH_COLORS[kind]
        shape = FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, boxstyle=rounded, **look)
    elif kind == "dense":
        look["facecolor"] = style.BRANCH_COLORS[kind]
        shape = Rectangle(corner, BOX_WIDTH, BOX_HEIGHT, **look)
    elif kind == "identity":
        shape = Rectangle(corner, BOX_WIDTH, BOX_HEIGHT, linestyle=(0, (4, 3)), **look)
    if shape is not None:
        axes.add_patch(shape)
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    axes.text(x, y, label, fontsize=style.SMALL_SIZE, color="black", **centred)
    if number is not None:
        below = corner[1] - 0.12
        axes.text(x, below, str(number), fontsize=7, color=style.MUTED, **centred)
