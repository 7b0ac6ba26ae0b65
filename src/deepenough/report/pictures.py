"""Pictures without a pair of number axes: tables of colours, lenses, shaded texts, diagrams.

In a diagram attention is a rounded box, dense an angular one, identity a dashed one; shape and
colour say the same thing twice, for readers who see only one of them.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from deepenough.figure import Axis, Diagram, HeatMap, MaybeNumbers, TokenText, shortened
from deepenough.report import style
from deepenough.report.charts import from_angle, to_angle

SQUARE_INCHES = 3.7
MAX_WIDTH = 20.0
BELOW_COLOR = "#DCDCDC"

MAX_LENS_TOKENS = 24
MAX_LENS_LETTERS = 9

TEXT_COLUMNS = 112
MAX_LINES = 60

MAX_PER_ROW = 12
ARROW = {"arrowstyle": "-|>", "color": style.INK, "shrinkA": 0, "shrinkB": 0}
_BOX: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 1.1, "facecolor": "white"}
BLOCKS: dict[str, dict[str, Any]] = {
    "attention": _BOX | {"boxstyle": "round,pad=0.8,rounding_size=1", "facecolor": style.SKY},
    "dense": _BOX | {"boxstyle": "square,pad=0.8", "facecolor": style.ORANGE},
    "identity": _BOX | {"boxstyle": "square,pad=0.8", "linestyle": (0, (4, 3))},
}


def add_scale(axes: Axes, mappable: ScalarMappable, value: Axis, **place: Any) -> None:
    """Add the scale of the colours beside the axes."""
    ticks = MaxNLocator(5)  # as many at every size, so that the layout finds room for them
    bar = axes.figure.colorbar(mappable, ax=axes, ticks=ticks, pad=0.02, fraction=0.046, **place)
    bar.set_label(value.label)
    bar.outline.set_visible(False)  # type: ignore[operator]
    if value.percent:
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def heat_size(panel: HeatMap) -> tuple[float, float]:
    """Return the inches that a heat map wants."""
    if panel.square:
        return SQUARE_INCHES + 0.9, SQUARE_INCHES + 0.5
    letters = max((len(text) for row in panel.texts for text in row), default=1)
    cell = max(0.30, 0.12 + 0.075 * letters, 2.6 / len(panel.columns))
    names = 0.3 + 0.075 * max(map(len, panel.rows), default=1)
    width = names + cell * len(panel.columns) + 1.0
    row = 0.45 if len(panel.rows) <= 4 else 0.24
    return min(max(width, 4.0), MAX_WIDTH), 0.9 + row * len(panel.rows)


def draw_heat(axes: Axes, panel: HeatMap) -> None:
    """Draw the cells with their texts and frames; those below the scale are hatched."""
    table = np.array(panel.values, dtype=float)
    rows, columns = table.shape
    scale = matplotlib.colormaps[style.COLOR_SCALE].with_extremes(under=BELOW_COLOR, bad="white")
    look: dict[str, Any] = {"aspect": "equal" if panel.square else "auto"}
    look |= {"origin": "lower" if panel.upwards else "upper", "interpolation": "nearest"}
    axes.imshow(table, cmap=scale, norm=_norm(panel.value), **look)
    width, height = heat_size(panel)
    cell = (SQUARE_INCHES if panel.square else width - 1.6) / columns
    every = max(1, int(np.ceil(0.24 / cell)))
    axes.set_xticks(range(0, columns, every), [style.drawable(c) for c in panel.columns[::every]])
    every = max(1, int(np.ceil(0.16 * rows / (height - 0.9))))
    axes.set_yticks(range(0, rows, every), [style.drawable(r) for r in panel.rows[::every]])
    axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(False)
    if not panel.square:
        # White gaps between the cells: neighbours of nearly one colour stay countable.
        axes.set_xticks(np.arange(0.5, columns - 1), minor=True)
        axes.set_yticks(np.arange(0.5, rows - 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.0)
        axes.tick_params(which="minor", length=0)
        axes.set_axisbelow(False)
    for row, column in np.argwhere(table < (panel.value.low or 0.0)):
        look = {"hatch": "/////", "edgecolor": style.FAINT, "linewidth": 0}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, **look))
    for row, column in panel.framed:
        # Within its cell: frames that touched would make a frame of a cell between them.
        look = {"edgecolor": style.VERMILION, "linewidth": 1.6, "zorder": 3}
        axes.add_patch(Rectangle((column - 0.46, row - 0.41), 0.92, 0.82, fill=False, **look))
    fill_cells(axes, panel.values, panel.texts)


def fill_cells(axes: Axes, values: Sequence[MaybeNumbers], texts: Sequence[Sequence[str]]) -> None:
    """Give the cells of a drawn heat map these values and texts, in place of any others."""
    image, table = axes.images[0], np.array(values, dtype=float)
    image.set_data(table)
    for old in list(axes.texts):
        old.remove()
    look: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    look["fontsize"] = style.SMALL_SIZE if len(table) <= 12 else style.LABEL_SIZE - 1.0
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            ink = style.ink_on(image.cmap(image.norm(table[row, column])))
            axes.text(column, row, text, color=ink, **look)


def _norm(scale: Axis) -> colors.Normalize:
    low, high = scale.low or 0.0, 1.0 if scale.high is None else scale.high
    if scale.scale == "root":
        return colors.PowerNorm(0.5, low, high)
    if scale.scale == "angle":
        return colors.FuncNorm((to_angle, from_angle), low, high)
    return colors.Normalize(low, high if high > low else low + 1.0)


def lens_map(panel: TokenText) -> HeatMap:
    """Return a lens as a heat map: layers upwards, tokens to the right, of many the last."""
    lens, some = panel.lens, slice(-MAX_LENS_TOKENS, None)
    assert lens is not None

    def cut(texts: Sequence[str]) -> list[str]:
        shown = (shortened(text.replace(" ", "␣"), MAX_LENS_LETTERS) for text in texts[some])
        return list(map(style.drawable, shown))

    last = len(lens.layers) - 1
    known = [
        next((i for i, layer in enumerate(lens.layers) if layer >= (depth or 0)), last)
        for depth in panel.depth[some]
    ]
    title = f"{panel.title} · framed: from this layer on the prediction stays the same"
    if len(panel.tokens) > MAX_LENS_TOKENS:
        title += f" · the last {MAX_LENS_TOKENS} of {len(panel.tokens)} tokens"
    return HeatMap(
        [str(layer) for layer in lens.layers],
        cut(panel.tokens),
        [row[some] for row in lens.probability],
        Axis("token read"),
        Axis("layer"),
        Axis("probability of the prediction", low=0.0, high=1.0),
        [cut(row) for row in lens.predictions],
        # Known from the last layer alone says nothing.
        [(row, token) for token, row in enumerate(known) if row < last],
        upwards=True,
        title=title,
    )


def tokens_size(panel: TokenText) -> tuple[float, float]:
    """Return the inches that a text wants."""
    return 9.0, 0.8 + 0.28 * (1 + max(line for line, _, _, _ in _wrapped(panel)))


def draw_tokens(axes: Axes, panel: TokenText) -> None:
    """Draw a text whose tokens are shaded by depth; of a very long one the beginning."""
    scale, norm = matplotlib.colormaps[style.COLOR_SCALE], colors.Normalize(0, panel.last)
    font = ["DejaVu Sans Mono", *style.families()]
    places = _wrapped(panel)
    for line, column, text, depth in places:
        width, ink = _width(text), style.BLACK
        if depth is not None:
            color = scale(norm(depth))
            ink = style.ink_on(color)
            axes.add_patch(Rectangle((column, line + 0.06), width, 0.88, color=color, linewidth=0))
        axes.text(
            column + width / 2, line + 0.5, text, ha="center", va="center", color=ink, family=font
        )
    axes.set(xlim=(0, TEXT_COLUMNS), ylim=(places[-1][0] + 1, 0))
    axes.axis("off")
    where: dict[str, Any] = {"location": "bottom", "anchor": (0.0, 1.0), "shrink": 0.4}
    add_scale(axes, ScalarMappable(norm, scale), Axis(panel.depth_name), aspect=40, **where)


def _wrapped(panel: TokenText) -> list[tuple[int, float, str, float | None]]:
    """Return line, column, text and depth of every token that is drawn."""
    places: list[tuple[int, float, str, float | None]] = []
    line, column = 0, 0.0
    for token, depth in zip(panel.tokens, panel.depth, strict=True):
        text = style.drawable(shortened(token, TEXT_COLUMNS // 2) if len(token) > 50 else token)
        if column + _width(text) > TEXT_COLUMNS:
            line, column = line + 1, 0.0
        if line == MAX_LINES:
            break
        places.append((line, column, text, depth))
        column += _width(text) + 0.2
    return places


def _width(text: str) -> int:
    """Return the columns of a fixed-width font that a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def diagram_size(panel: Diagram) -> tuple[float, float]:
    """Return the inches that a diagram wants."""
    rows, per_row = _rows(panel)
    return max(1.05 * per_row, 6.2), 0.4 + 1.1 * rows


def _rows(panel: Diagram) -> tuple[int, int]:
    """Return the number of rows and of places in each, for the blocks and both ends."""
    num = len(panel.blocks) + 2
    rows = -(-num // MAX_PER_ROW)
    return rows, -(-num // rows)


def draw_diagram(axes: Axes, panel: Diagram) -> None:
    """Draw the blocks from the input to the output; long patterns wrap to rows."""
    rows, per_row = _rows(panel)
    axes.set(xlim=(-0.5, per_row - 0.5), ylim=(rows - 0.5, -0.5))
    axes.axis("off")
    facts = style.drawable(shortened(panel.facts, int(diagram_size(panel)[0] * 12)))
    axes.set_title(facts, fontsize=style.TEXT_SIZE, color=style.MUTED)
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    name_look = centred | {"fontsize": style.SMALL_SIZE, "color": "black"}
    for i, block in enumerate(["tokens", *panel.blocks, "next\ntoken"]):
        row, column = divmod(i, per_row)
        axes.text(column, row, block, bbox=BLOCKS.get(block), **name_look)
        if block in BLOCKS:
            axes.text(column, row + 0.32, str(i), fontsize=7, color=style.MUTED, **centred)
        if i:
            # Into the first block of a row the arrow comes from the margin.
            axes.annotate("", (column - 0.4, row), (column - 0.6, row), arrowprops=ARROW)
