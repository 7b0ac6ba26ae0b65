"""Pictures that are not charts: texts with shaded tokens, the lens, and block diagrams.

In a diagram attention is a rounded box, dense an angular one, identity a dashed line that passes
through; shape and colour say the same thing twice, for readers who see only one of them.

In a lens, layers go upwards and tokens to the right. The shade is the probability of the predicted
token; bold predictions are the last layer's; the line in a column lies under the first layer from
which on they all are. The scale runs from white to a light blue, because it is a ground for text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Patch, Polygon, Rectangle

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
STEP = 0.98
BOX_WIDTH = 0.74
BOX_HEIGHT = 0.62
ROW_HEIGHT = 1.2
HEADER = 0.72
MARGIN = 0.22
MIN_WIDTH = 6.2
END_COLOR = "#E8E8E8"
LINE: dict[str, Any] = {"color": style.INK, "linewidth": 1.1}
DASHES = (0, (4, 3))


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


@dataclass(frozen=True)
class Stage:
    """One place of a diagram: what stands there and, for a block, its number."""

    kind: str
    label: str
    number: int | None = None


def arrange(blocks: list[Stage]) -> list[list[Stage]]:
    """Return rows of at most `MAX_PER_ROW` blocks, as even as can be, with both ends added."""
    num_rows = -(-len(blocks) // MAX_PER_ROW)
    per_row = -(-len(blocks) // num_rows)
    rows = [blocks[i : i + per_row] for i in range(0, len(blocks), per_row)]
    rows[0] = [Stage("text", "tokens"), Stage("embedding", "embed"), *rows[0]]
    rows[-1] = [*rows[-1], Stage("head", "output\nhead"), Stage("text", "next\ntoken")]
    return rows


def draw_diagram(panel: Diagram, heading: str) -> Figure:
    """Return the blocks from the input to the output; long patterns wrap to rows."""
    rows = arrange([Stage(kind, kind, i) for i, kind in enumerate(panel.blocks, start=1)])
    # Rows after the first start under its first block, so that blocks stand in columns.
    starts = [0.0] + [2 * STEP] * (len(rows) - 1)
    content = max(start + len(row) * STEP for start, row in zip(starts, rows, strict=True))
    width = max(content + 2 * MARGIN, MIN_WIDTH)
    height = HEADER + len(rows) * ROW_HEIGHT
    figure = style.new_figure(width, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    measure = measure_in(style.TITLE_SIZE)
    fitting = shorten(heading, lambda part: measure(part, False) < width - 2 * MARGIN)
    axes.text(MARGIN, height - 0.3, fitting, fontsize=style.TITLE_SIZE, va="center")
    axes.text(MARGIN, height - 0.56, style.drawable(panel.facts), color=style.MUTED, va="center")
    for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
        y = height - HEADER - (i + 0.5) * ROW_HEIGHT
        centres = [MARGIN + start + (j + 0.5) * STEP for j in range(len(row))]
        for j, (stage, x) in enumerate(zip(row, centres, strict=True)):
            _draw_stage(axes, stage, x, y)
            if j:
                before = row[j - 1]
                _connect(axes, before, stage, centres[j - 1] + _reach(before), x - _reach(stage), y)
        if i + 1 < len(rows):
            into = rows[i + 1][0]
            first = MARGIN + starts[i + 1] + STEP / 2
            _wrap(axes, row[-1], into, centres[-1] + _reach(row[-1]), first - _reach(into), y)
    return figure


def _draw_stage(axes: Axes, stage: Stage, x: float, y: float) -> None:
    left, bottom = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    right, top = x + BOX_WIDTH / 2, y + BOX_HEIGHT / 2
    look: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 1.1}
    slant = 0.14
    shape: Patch | None = None
    if stage.kind == "attention":
        # The padding of a FancyBboxPatch is outside its box; zero keeps it the size of the others.
        shape = FancyBboxPatch(
            (left, bottom), BOX_WIDTH, BOX_HEIGHT, boxstyle="round,pad=0,rounding_size=0.24",
            facecolor=style.BRANCH_COLORS["attention"], **look,
        )  # fmt: skip
    elif stage.kind == "dense":
        color = style.BRANCH_COLORS["dense"]
        shape = Rectangle((left, bottom), BOX_WIDTH, BOX_HEIGHT, facecolor=color, **look)
    elif stage.kind == "embedding":
        corners = [(left, bottom + slant), (right, bottom), (right, top), (left, top - slant)]
        shape = Polygon(corners, facecolor=END_COLOR, **look)
    elif stage.kind == "head":
        corners = [(left, bottom), (right, bottom + slant), (right, top - slant), (left, top)]
        shape = Polygon(corners, facecolor=END_COLOR, **look)
    if shape is not None:
        axes.add_patch(shape)
    text_y = y + 0.13 if stage.kind == "identity" else y
    axes.text(
        x, text_y, stage.label, fontsize=style.SMALL_SIZE, ha="center", va="center", color="black"
    )
    if stage.number is not None:
        below: dict[str, Any] = {
            "fontsize": 7,
            "color": style.MUTED,
            "ha": "center",
            "va": "center",
        }
        axes.text(x, bottom - 0.12, str(stage.number), **below)


def _reach(stage: Stage) -> float:
    """Return how far from its centre a stage is entered and left."""
    return {"identity": 0.0, "text": 0.27}.get(stage.kind, BOX_WIDTH / 2)


def _connect(axes: Axes, start: Stage, end: Stage, x_from: float, x_to: float, y: float) -> None:
    """Draw a line between neighbours, dashed where it passes through an identity."""
    through = "identity" in (start.kind, end.kind)
    axes.plot([x_from, x_to], [y, y], **(LINE | {"linestyle": DASHES if through else "-"}))
    _arrow(axes, end, x_to, y)


def _wrap(axes: Axes, start: Stage, end: Stage, x_from: float, x_to: float, y: float) -> None:
    """Draw a line from the end of a row, round below it, to the start of the next."""
    between, below = y - ROW_HEIGHT / 2, y - ROW_HEIGHT
    right = x_from - _reach(start) + STEP / 2
    left = x_to + _reach(end) - STEP / 2
    xs, ys = [right, right, left, left], [y, between, between, below]
    axes.plot(xs, ys, **LINE)
    for a, b, height, stage in ((x_from, right, y, start), (left, x_to, below, end)):
        axes.plot(
            [a, b],
            [height] * 2,
            **(LINE | {"linestyle": DASHES if stage.kind == "identity" else "-"}),
        )
    _arrow(axes, end, x_to, below)


def _arrow(axes: Axes, end: Stage, x: float, y: float) -> None:
    """Draw the head of an arrow, except into an identity, where nothing is entered."""
    if end.kind != "identity":
        axes.plot([x - 0.05], [y], marker=">", markersize=5, color=style.INK, linestyle="none")
