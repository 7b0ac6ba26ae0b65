"""Token by step: how much of each update was made, and how like its last state a token stays.

Colours run over the sine of the angle by which a state turns or would turn: a gate is its square,
and a similarity is what that square lacks to 1, so that most similarities would look the same. A
frame marks the step after which a token is at rest.
"""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps, colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deepenough.report import style
from deepenough.report.lazy_look import BY_ANGLE
from deepenough.report.lazy_source import Look, Side, last_look
from deepenough.report.source import Run

ROW_INCHES = 0.22
COLUMN_INCHES = 0.40
#: More steps than this leave no room for a number in each cell.
MAX_NUMBERED = 16
MAX_TOKENS = 60


@style.styled
def draw_tokens(run: Run) -> Figure | None:
    """Heat maps of the pair that was looked at last; None when none was."""
    look = last_look(run)
    if look is None:
        return None
    panels = ["gates", "similarity"] if look.sides[0].gates is not None else ["similarity"]
    heights = [max(3, min(len(side.tokens), MAX_TOKENS)) for side in look.sides]
    num_steps = max(side.similarity.shape[1] for side in look.sides)
    width = len(panels) * (1.9 + COLUMN_INCHES * max(6, num_steps))
    figure = style.new_figure(width, 1.9 + ROW_INCHES * sum(heights))
    axes = figure.subplots(2, len(panels), squeeze=False, height_ratios=heights)
    for row, (side, name) in enumerate(zip(look.sides, look.names, strict=True)):
        for column, panel in enumerate(panels):
            _draw_side(axes[row, column], side, name, panel, last=row == 1)
    room = int(12 * width)
    figure.suptitle(
        f"{style.shown(look.source, room)}\n{style.shown(look.target, room)}{_note(look)}",
        fontsize=style.TEXT_SIZE,
        x=0.01,
        ha="left",
    )
    return figure


def _note(look: Look) -> str:
    if look.epsilon is None or look.sides[0].depth is None:
        return ""
    whose = f"a token of the {look.words.source}"
    return f"\nframes: the last step of {whose} with epsilon {look.epsilon:g}"


def _draw_side(axes: Axes, side: Side, name: str, panel: str, last: bool) -> None:
    values = side.gates if panel == "gates" else side.similarity
    assert values is not None
    values = values[:MAX_TOKENS]
    if panel == "gates":
        norm: colors.Normalize = colors.PowerNorm(0.5, 0.0, 1.0)
        title = "gate: share of the update made"
    else:
        lowest = np.floor(10 * min(float(values.min()), 0.9)) / 10
        norm = colors.FuncNorm(BY_ANGLE, lowest, 1.0)
        title = "similarity to the state before"
    image = axes.imshow(values, norm=norm, cmap=style.PROBABILITY_SCALE, aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    num_tokens, num_steps = values.shape
    if num_steps <= MAX_NUMBERED:
        _write_numbers(axes, values, norm)
    if panel == "gates" and side.depth is not None:
        for token, depth in enumerate(side.depth[:num_tokens]):
            # Within its cell: frames that touched would make a frame of a cell between them.
            frame = Rectangle((depth - 1.46, token - 0.41), 0.92, 0.82, fill=False,
                              edgecolor=style.ORANGE, linewidth=1.4)  # fmt: skip
            axes.add_patch(frame)
    axes.set_xticks(range(num_steps), [str(step + 1) for step in range(num_steps)])
    labels = [style.shown(token, 16) for token in side.tokens[:num_tokens]]
    axes.set_yticks(range(num_tokens), labels)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_title(f"{name}, {title}", fontsize=style.TEXT_SIZE)
    if last:
        axes.set_xlabel("step")


def _write_numbers(axes: Axes, values: np.ndarray, norm: colors.Normalize) -> None:
    """Two digits behind the point, three where a value is almost 1."""
    scale = colormaps[style.PROBABILITY_SCALE]
    for (token, step), value in np.ndenumerate(values):
        text = f"{value:.3f}" if 0.985 <= value < 0.9995 else f"{value:.2f}"
        text = "1" if text == "1.00" else text[1:]
        axes.text(step, token, text, ha="center", va="center", fontsize=style.LABEL_SIZE - 1.0,
                  color=style.ink_on(scale(norm(value))))  # fmt: skip
