"""A pattern of blocks as a drawing: input, embedding, blocks, output head.

Attention is a rounded box, dense an angular one, identity a dashed line that passes through;
shape and colour say the same thing twice, for readers who see only one of them. Long patterns
wrap to rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Polygon, Rectangle

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.source import Run, block_states, last_value, number

MAX_PER_ROW = 12

# One unit of the drawing is one inch, so text and boxes keep their proportion in every figure.
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


@dataclass(frozen=True)
class Stage:
    """One place of the drawing: what stands there and, for a block, its number."""

    kind: str
    label: str
    number: int | None = None


def parse_pattern(pattern: str) -> list[Stage]:
    """One stage a block; UserError for a pattern that is not one."""
    if not pattern:
        raise UserError("The pattern is empty; give one letter a block, such as aadad-.")
    unknown = sorted(set(pattern) - set(style.LETTERS))
    if unknown:
        raise UserError(
            f"The pattern {style.shown(pattern)!r} has the unknown letter {unknown[0]!r}; "
            "use a for attention, d for dense and - for identity."
        )
    kinds = [style.BRANCHES[style.LETTERS.index(letter)] for letter in pattern]
    return [Stage(kind, kind, i) for i, kind in enumerate(kinds, start=1)]


def arrange(blocks: list[Stage]) -> list[list[Stage]]:
    """Rows of at most `MAX_PER_ROW` blocks, as even as can be; the ends join the outer rows."""
    num_rows = -(-len(blocks) // MAX_PER_ROW)
    per_row = -(-len(blocks) // num_rows)
    rows = [blocks[i : i + per_row] for i in range(0, len(blocks), per_row)]
    rows[0] = [Stage("text", "tokens"), Stage("embedding", "embed"), *rows[0]]
    rows[-1] = [*rows[-1], Stage("head", "output\nhead"), Stage("text", "next\ntoken")]
    return rows


@style.styled
def draw_architecture(
    pattern: str,
    *,
    title: str = "",
    num_parameters: float | None = None,
    relative_cost: float | None = None,
) -> Figure:
    """Draw any pattern, such as `aadad-`; what is not known is not written."""
    rows = arrange(parse_pattern(pattern))
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

    facts = _facts(pattern, num_parameters, relative_cost)
    heading = " · ".join(
        part for part in (style.shown(title, 72), style.shown(pattern, 64)) if part
    )
    axes.text(MARGIN, height - 0.3, heading, fontsize=style.TITLE_SIZE, va="center")
    axes.text(MARGIN, height - 0.56, facts, color=style.MUTED, va="center")

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
            _turn(axes, row[-1], into, centres[-1] + _reach(row[-1]), first - _reach(into), y)
    return figure


def draw_derived(run: Run) -> Figure | None:
    """The architecture a run derived, was given, or leads to so far; None without a pattern."""
    name = style.shown(run.name)
    derived = _known_pattern(last_value(run, "pattern"))
    given = _given_pattern(run.config)
    states = block_states(run)
    if derived:
        pattern, title = derived, f"{name} · derived"
    elif given:
        pattern, title = given, name
    elif states:
        pattern, title = states[-1].pattern, f"{name} · leading at step {states[-1].step:,}"
    else:
        return None
    return draw_architecture(
        pattern,
        title=title,
        num_parameters=number(last_value(run, "parameters")),
        relative_cost=number(last_value(run, "relative_cost")),
    )


def _given_pattern(config: Mapping[str, object]) -> str | None:
    """The pattern in the settings of the model; empty or absent for a search."""
    for place in (config.get("model"), config):
        pattern = _known_pattern(place.get("pattern")) if isinstance(place, Mapping) else None
        if pattern:
            return pattern
    return None


def _known_pattern(value: object) -> str | None:
    """`value` if it is a pattern that can be drawn; another must not cost the other figures."""
    return value if isinstance(value, str) and value and set(value) <= set(style.LETTERS) else None


def _facts(pattern: str, num_parameters: float | None, relative_cost: float | None) -> str:
    parts = [
        f"{pattern.count(letter)} {kind}"
        for letter, kind in zip(style.LETTERS, style.BRANCHES, strict=True)
        if letter in pattern
    ]
    if num_parameters is not None:
        parts.append(f"{style.short_number(num_parameters)} parameters")
    if relative_cost is not None:
        parts.append(f"relative cost {relative_cost:.2f}")
    return " · ".join(parts)


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
    """How far from its centre a stage is entered and left."""
    return {"identity": 0.0, "text": 0.27}.get(stage.kind, BOX_WIDTH / 2)


def _connect(axes: Axes, start: Stage, end: Stage, x_from: float, x_to: float, y: float) -> None:
    """A line between neighbours, dashed where it passes through an identity."""
    through = "identity" in (start.kind, end.kind)
    axes.plot([x_from, x_to], [y, y], **(LINE | {"linestyle": DASHES if through else "-"}))
    _arrow(axes, end, x_to, y)


def _turn(axes: Axes, start: Stage, end: Stage, x_from: float, x_to: float, y: float) -> None:
    """From the end of a row, round below it, to the start of the next."""
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
    """The head of an arrow, except into an identity, where nothing is entered."""
    if end.kind != "identity":
        axes.plot([x - 0.05], [y], marker=">", markersize=5, color=style.INK, linestyle="none")
