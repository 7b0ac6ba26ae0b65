"""BLEU for other steps than those of training, and for tokens that stop sooner or later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deepenough.report import style
from deepenough.report.lazy_source import epsilon_points, step_grid, trained_steps
from deepenough.report.source import Run

COLUMN_INCHES = 0.62
ROW_INCHES = 0.42


@style.styled
def draw_step_grid(run: Run) -> Figure | None:
    """Encoder by decoder steps, the trained ones framed; None when no grid was swept."""
    found = step_grid(run)
    if not found:
        return None
    encoder, decoder = (sorted({key[side] for key in found}) for side in (0, 1))
    values = np.array([[found.get((e, d), np.nan) for e in encoder] for d in decoder])
    figure = style.new_figure(
        2.6 + COLUMN_INCHES * max(4, len(encoder)), 1.5 + ROW_INCHES * max(3, len(decoder))
    )
    axes = figure.subplots()
    image = axes.imshow(values, cmap=style.PROBABILITY_SCALE, aspect="auto", origin="lower")
    figure.colorbar(image, ax=axes, label="BLEU", pad=0.02)
    scale = colormaps[style.PROBABILITY_SCALE]
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(column, row, f"{value:.1f}", ha="center", va="center",
                      fontsize=style.SMALL_SIZE,
                      color=style.ink_on(scale(image.norm(value))))  # fmt: skip
    trained = trained_steps(run)
    if trained is not None and trained in found:
        corner = (encoder.index(trained[0]) - 0.5, decoder.index(trained[1]) - 0.5)
        axes.add_patch(
            Rectangle(corner, 1, 1, fill=False, edgecolor=style.VERMILION, linewidth=2.0)
        )
        axes.set_title("BLEU; framed: the steps of training", fontsize=style.TEXT_SIZE)
    axes.set_xticks(range(len(encoder)), [str(steps) for steps in encoder])
    axes.set_yticks(range(len(decoder)), [str(steps) for steps in decoder])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel("encoder steps")
    axes.set_ylabel("decoder steps")
    return figure


@style.styled
def draw_epsilon_curve(run: Run) -> Figure | None:
    """BLEU against the encoder's FLOPs and seconds; None when no epsilon was swept."""
    points = epsilon_points(run)
    full = next((point for point in points if point["epsilon"] == 0.0), None)
    if full is None or len(points) < 2:
        return None
    figure = style.new_figure(7.6, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, cost, name, color in (
        (left, "encoder_flops", "encoder FLOPs", style.BLUE),
        (right, "encoder_seconds", "encoder seconds", style.GREEN),
    ):
        shares = [100.0 * point[cost] / full[cost] for point in points]
        scores = [point["bleu"] for point in points]
        axes.plot(shares, scores, color=color, marker="o", markersize=4)
        for index, point in enumerate(points):
            offset, side = _beside_the_line(shares, scores, index)
            axes.annotate(f"{point['epsilon']:g}", (shares[index], scores[index]), offset,
                          textcoords="offset points", fontsize=style.LABEL_SIZE,
                          ha=side, color=style.MUTED)  # fmt: skip
        axes.set_xlabel(f"{name}, % of the full model's")
        axes.margins(x=0.14, y=0.15)
    left.set_ylabel("BLEU")
    left.set_title("numbers: epsilon", fontsize=style.SMALL_SIZE)
    return figure


def _beside_the_line(
    xs: Sequence[float], ys: Sequence[float], index: int
) -> tuple[tuple[float, float], str]:
    """Where a point's label crosses no line: how far from the point, in points, and on which side.

    Below a valley, above and left of a line that goes on rising, above and right of all others.
    """
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    place = order.index(index)
    comes_down = place > 0 and ys[order[place - 1]] > ys[index]
    goes_up = place + 1 < len(order) and ys[order[place + 1]] > ys[index]
    if comes_down and goes_up:
        return (0, -12), "center"
    return ((-5, 4), "right") if goes_up else ((5, 4), "left")
