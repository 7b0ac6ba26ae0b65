"""How long a pondering classifier thinks: accuracy against mean passes, and passes by group.

Notable choices:

- The frontier shows every way of stopping that was measured, on one pair of axes: thresholds of the
  halting probability, patience (PABEE), and one and the same pass for everybody. What deciding for
  each example adds is the gap to the last of these.
- Passes by difficulty are shares of each row, not counts: groups differ in size by orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from deepenough.report import style
from deepenough.report.ponder_source import ExitPoint, PassTable, exit_points, pass_tables
from deepenough.report.source import Run

#: What each model and each way of stopping is called.
MODELS = {"ponder": "pondering", "weighted": "PABEE-trained", "last": "full depth"}
POLICIES = {
    "quantile": "halting",
    "confidence": "confidence",
    "patience": "patience",
    "fixed": "fixed exit",
}
LOOKS: dict[str, dict[str, Any]] = {
    "quantile": {"linestyle": "-", "marker": "o", "markersize": 3.5},
    "confidence": {"linestyle": "-", "marker": "^", "markersize": 4.0},
    "patience": {"linestyle": "--", "marker": "s", "markersize": 4.0},
    "fixed": {"linestyle": ":", "marker": "D", "markersize": 3.5},
}
COLORS = {
    ("ponder", "quantile"): style.BLUE,
    ("ponder", "confidence"): style.GREEN,
    ("ponder", "patience"): style.SKY,
    ("ponder", "fixed"): style.FAINT,
    ("weighted", "confidence"): style.PURPLE,
    ("weighted", "patience"): style.VERMILION,
    ("weighted", "fixed"): style.ORANGE,
}
#: The accuracies shown start no lower than so far below the best, in points of a share: exits after
#: the first pass would else press everything of interest together.
DEPTH_SHOWN = 0.12


@style.styled
def draw_ponder_frontier(run: Run) -> Figure | None:
    """Accuracy against mean passes of every way of stopping; None without any."""
    points = exit_points(run)
    if not points:
        return None
    figure = style.new_figure(7.4, 4.6)
    axes = figure.subplots()
    full = [p for p in points if p.model == "last" and p.policy == "fixed"]
    for (model, policy), line in _lines(points).items():
        axes.plot(
            [p.passes for p in line],
            [p.accuracy for p in line],
            label=f"{MODELS.get(model, style.shown(model))}, {POLICIES.get(policy, policy)}",
            color=COLORS.get((model, policy), style.PURPLE),
            markeredgecolor="white",
            markeredgewidth=0.4,
            zorder=4 if policy == "quantile" else 3,
            **LOOKS.get(policy, {}),
        )
    if full:
        best = max(full, key=lambda point: point.passes)
        axes.axhline(best.accuracy, color=style.BLACK, linewidth=0.9, zorder=2)
        axes.plot([best.passes], [best.accuracy], "*", color=style.BLACK, markersize=12, zorder=5,
                  label=f"{MODELS['last']}, fine-tuned alone")  # fmt: skip
    top = max(point.accuracy for point in points)
    bottom = min(point.accuracy for point in points)
    axes.set_ylim(max(bottom, top - DEPTH_SHOWN) - 0.004, top + 0.006)
    axes.set_xlabel("mean passes")
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"accuracy against mean passes: {style.shown(run.name)}")
    axes.legend(loc="lower right")
    return figure


def _lines(points: Sequence[ExitPoint]) -> dict[tuple[str, str], list[ExitPoint]]:
    """Points of one model and policy by rising passes; full depth alone is a mark, not a line."""
    lines: dict[tuple[str, str], list[ExitPoint]] = {}
    for point in points:
        if point.model != "last":
            lines.setdefault((point.model, point.policy), []).append(point)
    return {key: sorted(line, key=lambda p: p.passes) for key, line in lines.items()}


@style.styled
def draw_passes(run: Run) -> Figure | None:
    """How many passes examples take, by label and by difficulty; None without a table."""
    tables = {table.by: table for table in pass_tables(run) if table.model in ("ponder", "")}
    by_label, by_difficulty = tables.get("label"), tables.get("difficulty")
    if by_label is None and by_difficulty is None:
        return None
    shown = [table for table in (by_label, by_difficulty) if table is not None]
    figure = style.new_figure(5.0 * len(shown), 3.8)
    for axes, table in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        if table.by == "label" and len(table.groups) <= len(style.CYCLE):
            _draw_bars(axes, table)
        else:
            _draw_shares(figure, axes, table)
    return figure


def _draw_bars(axes: Axes, table: PassTable) -> None:
    num_groups, num_passes = table.counts.shape
    passes = np.arange(1, num_passes + 1)
    totals = table.counts.sum(axis=1, keepdims=True)
    shares = np.divide(table.counts, totals, out=np.zeros_like(table.counts), where=totals > 0)
    width = 0.8 / num_groups
    for group, (name, row) in enumerate(zip(table.groups, shares, strict=True)):
        mean = float((row * passes).sum())
        offset = (group - (num_groups - 1) / 2) * width
        axes.bar(passes + offset, row, width * 0.92, color=style.CYCLE[group],
                 label=f"{style.shown(name, 24)} (mean {mean:.2f})")  # fmt: skip
    axes.set_title("passes by label")
    axes.set_xlabel("passes")
    axes.set_ylabel("share of the label's examples")
    axes.set_xticks(passes)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend()


def _draw_shares(figure: Figure, axes: Axes, table: PassTable) -> None:
    """A row a group: where its examples stopped, as shares."""
    totals = table.counts.sum(axis=1)
    kept = totals > 0
    counts, totals = table.counts[kept], totals[kept]
    names = [name for name, keep in zip(table.groups, kept, strict=True) if keep]
    shares = counts / totals[:, None]
    image = axes.imshow(shares, cmap=style.PROBABILITY_SCALE, vmin=0.0, vmax=1.0, aspect="auto")
    axes.grid(visible=False)
    for row in range(shares.shape[0]):
        for column in range(shares.shape[1]):
            if shares[row, column] >= 0.005:
                color = style.ink_on(image.cmap(image.norm(shares[row, column])))
                axes.text(column, row, f"{shares[row, column]:.0%}", ha="center", va="center",
                          fontsize=style.LABEL_SIZE, color=color)  # fmt: skip
    axes.set_xticks(range(shares.shape[1]), [str(n + 1) for n in range(shares.shape[1])])
    labels = [
        f"{style.shown(name, 16)}  ({int(total)})"
        for name, total in zip(names, totals, strict=True)
    ]
    axes.set_yticks(range(len(names)), labels)
    axes.set_xlabel("passes made")
    difficulty = table.by == "difficulty"
    axes.set_ylabel("answer settled at pass (examples)" if difficulty else "label (examples)")
    axes.set_title("passes by difficulty" if difficulty else "passes by label")
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label("share of the row")
