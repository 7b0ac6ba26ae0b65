"""Curves of a training: loss, perplexity, tau, learning rate, entropy of the search.

Notable choices:

- The training line is smoothed in the loss, and its perplexity is the exponential of that: the
  mean of per-batch perplexities is dominated by the worst batches and is no perplexity of
  anything.
- Several runs share each panel, one colour a run; a panel that no run has data for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from deepenough.report import style
from deepenough.report.source import Run, series

Points = tuple[np.ndarray, np.ndarray]

#: The smoothing looks over this share of the records to either side.
SMOOTHING_SHARE = 0.025
#: A perplexity that falls by more than this factor needs a logarithmic scale to be seen whole.
LOG_SCALE_FACTOR = 4.0
#: exp() of more than this is no number a panel can show.
MAX_LOSS = 100.0


@dataclass(frozen=True)
class Panel:
    """One quantity of the small panels: its title and the name it is recorded under."""

    title: str
    name: str
    low: float | None = None
    high: float | None = None


SMALL_PANELS = (
    Panel("temperature τ", "tau", low=0.0),
    Panel("learning rate", "lr", low=0.0),
    Panel("entropy of the search (0 = decided)", "entropy", low=0.0, high=1.0),
)

#: How each kind of record is drawn; several runs keep the marks and change the colours.
MARKS: dict[str, dict[str, Any]] = {
    "train": {"color": style.CYCLE[0], "linestyle": "-"},
    "valid": {"color": style.VERMILION, "linestyle": "none", "marker": "o", "markersize": 5,
              "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3},
    # Larger and beneath, because the last validation is often at the same place.
    "test": {"color": style.BLACK, "linestyle": "none", "marker": "*", "markersize": 12,
             "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 2.5},
}  # fmt: skip


def smooth(steps: np.ndarray, values: np.ndarray, half_window: int) -> np.ndarray:
    """Every value replaced by the line fitted to it and `half_window` neighbours to either side.

    A moving average would lag behind the steep fall at the start and a centred mean would bend the
    two ends; a local line does neither.
    """
    n = len(values)
    if half_window < 1 or n < 3:
        return values
    first = np.maximum(np.arange(n) - half_window, 0)
    last = np.minimum(np.arange(n) + half_window + 1, n)
    x = (steps - steps.mean()) / max(np.ptp(steps), 1.0)

    def window_mean(quantity: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(quantity)])
        return (total[last] - total[first]) / (last - first)

    mean_x, mean_y = window_mean(x), window_mean(values)
    variance = window_mean(x * x) - mean_x**2
    covariance = window_mean(x * values) - mean_x * mean_y
    # Steps too close together for a slope to mean anything get the plain mean.
    slope = np.divide(covariance, variance, out=np.zeros(n), where=variance > 1e-12)
    return mean_y + slope * (x - mean_x)


def losses(run: Run, kind: str) -> Points:
    """Loss per step; a record with a perplexity alone counts by its logarithm."""
    steps, values = series(run, kind, "loss")
    if not len(steps):
        steps, values = series(run, kind, "perplexity")
        steps, values = steps[values > 0], np.log(values[values > 0])
    return steps, values


def perplexities(points: Points) -> Points:
    """exp(loss), without the points that would overflow."""
    steps, values = points
    fits = values < MAX_LOSS
    return steps[fits], np.exp(values[fits])


def line_look(index: int) -> dict[str, Any]:
    """Colour and line style of the run with that number."""
    lap, color = divmod(index, len(style.CYCLE))
    return {
        "color": style.CYCLE[color],
        "linestyle": style.LINE_STYLES[lap % len(style.LINE_STYLES)],
    }


@style.styled
def draw_training(runs: Sequence[Run]) -> Figure | None:
    """The curves of one run or of several over one another; None when there is no curve at all."""
    has_loss = any(len(losses(run, kind)[0]) for run in runs for kind in ("train", "valid", "test"))
    small = [p for p in SMALL_PANELS if any(len(series(r, "train", p.name)[0]) for r in runs)]
    if not has_loss and not small:
        return None
    heights = [3.2] * has_loss + [2.1] * bool(small)
    figure = style.new_figure(10.0, sum(heights) + 0.7)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    if has_loss:
        left, right = grid[0].subgridspec(1, 2).subplots(squeeze=False)[0]
        _draw_losses(left, runs, "loss (nats per token)", lambda points: points)
        _draw_losses(right, runs, "perplexity", perplexities)
        _scale_perplexity(right)
    if small:
        all_axes = grid[-1].subgridspec(1, len(small)).subplots(squeeze=False)[0]
        for axes, panel in zip(all_axes, small, strict=True):
            _draw_panel(axes, runs, panel)
    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(style.short_number))
        axes.set_xlim(left=0)
    _add_legend(figure, runs)
    return figure


def _draw_losses(
    axes: Axes, runs: Sequence[Run], title: str, convert: Callable[[Points], Points]
) -> None:
    axes.set_title(title)
    for index, run in enumerate(runs):
        steps, values = losses(run, "train")
        smoothed = smooth(steps, values, int(SMOOTHING_SHARE * len(values)))
        if len(runs) == 1:
            axes.plot(*convert((steps, values)), color=style.FAINT, linewidth=0.6, alpha=0.45)
        points = {"train": (steps, smoothed)}
        points |= {kind: losses(run, kind) for kind in ("valid", "test")}
        own = line_look(index)
        for kind, look in MARKS.items():
            if len(runs) > 1:
                look = look | (own if kind == "train" else {"color": own["color"]})
            axes.plot(*convert(points[kind]), **look)


def _scale_perplexity(axes: Axes) -> None:
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    if len(shown) and shown.max() > LOG_SCALE_FACTOR * shown.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(style.short_number))


def _draw_panel(axes: Axes, runs: Sequence[Run], panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=style.TEXT_SIZE)
    for index, run in enumerate(runs):
        axes.plot(*series(run, "train", panel.name), **line_look(index))
    if panel.low is not None:
        axes.set_ylim(bottom=panel.low)
    if panel.high is not None:
        axes.set_ylim(top=panel.high)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(style.short_number))


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    """Names above the panels: with one run of the marks, with several of the colours too."""
    several = len(runs) > 1
    entries: list[tuple[Line2D, str]] = []
    if several:
        for index, run in enumerate(runs):
            name = style.shown(run.name, 32) + _final(run, "valid", "valid ")
            entries.append((Line2D([], [], **line_look(index)), name))
    else:
        figure.suptitle(style.shown(runs[0].name), x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    for kind, look in MARKS.items():
        if any(len(losses(run, kind)[0]) for run in runs):
            mark = Line2D([], [], **(look | {"color": style.INK} if several else look))
            text = "train (smoothed)" if kind == "train" else kind
            entries.append((mark, text if several else text + _final(runs[0], kind, "perplexity ")))
    if entries:
        handles, texts = zip(*entries, strict=True)
        figure.legend(handles, texts, loc="outside upper right", ncols=min(len(entries), 3))


def _final(run: Run, kind: str, what: str) -> str:
    """The last recorded perplexity in brackets; nothing for the noisy one of a training batch."""
    values = perplexities(losses(run, kind))[1]
    return f" ({what}{values[-1]:.4g})" if len(values) and kind != "train" else ""
