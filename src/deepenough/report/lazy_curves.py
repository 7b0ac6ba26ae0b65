"""Whole sentences: how like itself one stays from step to step, and when its tokens rest."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from deepenough.report import style
from deepenough.report.lazy_look import BY_ANGLE, TICKS
from deepenough.report.lazy_source import last_look, last_rest, words_of
from deepenough.report.source import Run


@style.styled
def draw_sentence(run: Run) -> Figure | None:
    """Similarity of consecutive states of the mean token; None when nothing was looked at."""
    look, many = last_look(run), last_rest(run)
    if look is None and many is None:
        return None
    figure = style.new_figure(5.6, 3.6)
    axes = figure.subplots()
    longest = 1
    if many is not None:
        mean = np.array(many["similarity"])
        steps = np.arange(1, len(mean) + 1)
        longest = max(longest, len(mean))
        low, high = many["quartiles"]
        axes.fill_between(steps, low, high, color=style.SKY, alpha=0.35, linewidth=0,
                          label="middle half of them")  # fmt: skip
        name = f"mean of {many['sentences']} {words_of(many).sources}"
        axes.plot(steps, mean, color=style.BLUE, marker="o", markersize=4, label=name)
    if look is not None:
        looks = ((style.BLACK, "s", "--"), (style.VERMILION, "D", ":"))
        for side, name, (color, marker, line) in zip(look.sides, look.names, looks, strict=True):
            steps = np.arange(1, len(side.sentence) + 1)
            longest = max(longest, len(steps))
            axes.plot(steps, side.sentence, color=color, marker=marker, linestyle=line,
                      markersize=4, label=f"this pair, {name}")  # fmt: skip
        axes.set_title(style.shown(look.source, 70), fontsize=style.SMALL_SIZE)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("step")
    axes.set_ylabel("similarity to the state before")
    lowest = min(float(np.min(line.get_ydata())) for line in axes.lines)
    axes.set_yscale("function", functions=BY_ANGLE)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_ylim(max(0.0, lowest - 0.1), 1.0)
    axes.legend(loc="lower right")
    return figure


@style.styled
def draw_rest(run: Run) -> Figure | None:
    """After how many steps source tokens rest; None where no lazy model was looked at."""
    many = last_rest(run)
    if many is None or "tokens_by_steps" not in many:
        return None
    counts = np.array(many["tokens_by_steps"], dtype=float)
    steps = np.arange(1, len(counts) + 1)
    share = counts / counts.sum()
    figure = style.new_figure(5.6, 3.4)
    axes = figure.subplots()
    bars = axes.bar(steps, share, 0.75, color=style.BLUE)
    # Those of the last step need not rest: there was no more.
    bars[-1].set(facecolor="white", edgecolor=style.BLUE, hatch="////")
    for step, part in zip(steps, share, strict=True):
        axes.text(
            float(step), part, f"{part:.0%}", ha="center", va="bottom", fontsize=style.LABEL_SIZE
        )
    mean = float((steps * share).sum())
    top = 1.2 * float(share.max())
    axes.plot([mean], [0.95 * top], marker="v", markersize=9, color=style.VERMILION)
    axes.set_title(
        f"epsilon {many['epsilon']:g}, patience {many['patience']}: "
        f"{mean:.1f} of {len(counts)} steps on average (triangle)",
        fontsize=style.TEXT_SIZE,
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xticks(steps)
    axes.set_ylim(top=top)
    axes.grid(axis="x", visible=False)
    words = words_of(many)
    axes.set_xlabel(f"steps that a token of the {words.source} makes (hatched: all there are)")
    axes.set_ylabel(f"tokens of {many['sentences']} {words.sources}")
    return figure
