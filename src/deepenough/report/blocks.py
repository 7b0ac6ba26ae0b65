"""Block-type probabilities per block as a heat map, the leading value of each block written in.

Rows are the branches, columns the blocks. Only the leading value is written: it is what `derive`
reads, and three numbers in every column would hide it.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from deepenough.report import style
from deepenough.report.source import BlockState, Run, block_states

MAX_WIDTH = 16.0
CELL_INCHES = 0.56
#: Below this a value in its cell would touch its neighbours, so it is turned upright.
UPRIGHT_BELOW_INCHES = 0.34


@dataclass
class HeatMap:
    """A drawn heat map whose state can be replaced, as an animation does."""

    figure: Figure
    image: AxesImage
    texts: list[Text]
    title: Text

    def show(self, state: BlockState, title: str) -> None:
        """Replace the values, their text and the title."""
        self.image.set_data(state.pi.T)
        scale = matplotlib.colormaps[style.PROBABILITY_SCALE]
        for block, (row, text) in enumerate(zip(state.pi, self.texts, strict=True)):
            leading = int(row.argmax())
            text.set_position((block, leading))
            text.set_text(f"{row[leading]:.2f}")
            text.set_color(style.ink_on(scale(row[leading])))
        self.title.set_text(title)


def describe(run: Run, state: BlockState) -> str:
    """The name of the run and, on a line of its own, the step and tau where it is known."""
    tau = "" if state.tau is None else f" · τ {state.tau:.2f}"
    return f"{style.shown(run.name)}\nstep {state.step:,}{tau}"


@style.styled
def heat_map(state: BlockState, title: str) -> HeatMap:
    """Draw one state."""
    num_blocks = len(state.pi)
    width = min(MAX_WIDTH, max(5.0, 2.2 + CELL_INCHES * num_blocks))
    cell = (width - 2.2) / num_blocks
    figure = style.new_figure(width, 2.55)
    axes = figure.add_subplot()
    image = axes.imshow(
        state.pi.T,
        cmap=style.PROBABILITY_SCALE,
        vmin=0.0,
        vmax=1.0,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_yticks(range(len(style.BRANCHES)), style.BRANCHES, fontsize=style.TEXT_SIZE)
    every = max(1, int(np.ceil(0.22 / cell)))
    ticks = range(0, num_blocks, every)
    axes.set_xticks(ticks, [str(i + 1) for i in ticks])
    axes.set_xlabel("block")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    # White gaps between the cells: neighbours of nearly one colour stay countable.
    for edge in np.arange(0.5, num_blocks - 1):
        axes.axvline(edge, color="white", linewidth=1.2)
    for edge in (0.5, 1.5):
        axes.axhline(edge, color="white", linewidth=1.2)
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.04, ticks=[0.0, 0.5, 1.0])
    bar.set_label("probability")
    bar.outline.set_visible(False)  # type: ignore[operator]
    upright = cell < UPRIGHT_BELOW_INCHES
    size = style.TEXT_SIZE if cell > 0.42 else style.SMALL_SIZE
    texts = [
        axes.text(0, 0, "", ha="center", va="center", fontsize=size, rotation=90 if upright else 0)
        for _ in range(num_blocks)
    ]
    drawn = HeatMap(figure, image, texts, axes.set_title(""))
    drawn.show(state, title)
    return drawn


def draw_blocks(run: Run) -> Figure | None:
    """The final state of the search, or None for a run that did not search."""
    states = block_states(run)
    if not states:
        return None
    final = states[-1]
    pattern = style.shown(final.pattern, 48)
    return heat_map(final, f"{describe(run, final)} · leading {pattern}").figure
