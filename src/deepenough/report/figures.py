"""Figures that belong to no single method: training curves, and the frontier of a comparison.

The training line is smoothed in the loss, and its perplexity is the exponential of that: the mean
of per-batch perplexities is dominated by the worst batches and is no perplexity of anything.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepenough import figure as fig
from deepenough.artifacts import read_json
from deepenough.config import from_fields
from deepenough.errors import UserError
from deepenough.measurement import Comparison, shown
from deepenough.registry import METHODS

# -- training curves --------------------------------------------------------------------------

SMOOTHING_SHARE = 0.025
"""The smoothing looks over this share of the records to either side."""
LOG_SCALE_FACTOR = 4.0
"""A perplexity that falls by more than this factor needs a logarithmic scale to be seen whole."""
MAX_LOSS = 100.0
"""exp() of more than this is no number that a panel can show."""

KINDS = ("train", "valid", "test")
SMOOTHED = "train (smoothed)"
SMALL_PANELS = (
    ("tau", fig.Axis("temperature", low=0.0)),
    ("lr", fig.Axis("learning rate", low=0.0)),
    ("entropy", fig.Axis("entropy of the search (0: decided)", low=0.0, high=1.0)),
)


def smooth(steps: Sequence[float], values: Sequence[float], half_window: int) -> Sequence[float]:
    """Replace every value by the line fitted to it and `half_window` neighbours to either side.

    A moving average would lag behind the steep fall at the start and a centred mean would bend the
    two ends; a local line does neither.
    """
    if half_window < 1 or len(values) < 3:
        return values
    fitted = []
    for i, step in enumerate(steps):
        near = slice(max(0, i - half_window), i + half_window + 1)
        fitted.append(float(np.polyfit(np.array(steps[near]) - step, values[near], 1)[1]))
    return fitted


def training_figure(*runs: fig.Run, command: str = "") -> fig.FigureSpec | None:
    """Return the curves of one run, or of several over one another; None without any curve."""
    several = len(runs) > 1
    step = fig.Axis("step", whole=True, low=0.0)
    panels: list[fig.Panel] = []
    lines = [line for place, run in enumerate(runs) for line in _loss_lines(run, place, several)]
    if lines:
        panels.append(fig.Chart(step, fig.Axis("loss"), lines, title="loss"))
        if any(fig.series(run, kind, "perplexity")[0] for run in runs for kind in KINDS):
            panels.append(_perplexity_panel(step, lines))
    names = [fig.shortened(run.name, 32) if several else SMOOTHED for run in runs]
    for key, axis in SMALL_PANELS:
        found = [fig.series(run, "train", key) for run in runs]
        curves = [
            fig.Line(names[place], *own, place, marker=False)
            for place, own in enumerate(found)
            if own[0]
        ]
        if curves:
            panels.append(fig.Chart(step, axis, curves, title=axis.label))
    if not panels:
        return None
    title = "Training curves"
    caption = "As recorded while training; the training loss is smoothed."
    subject = ", ".join(run.name for run in runs)
    return fig.FigureSpec("training", title, caption, panels, subject, command, wide=True)


def _loss_lines(run: fig.Run, place: int, several: bool) -> list[fig.Line]:
    """Return the losses of a run alone, or of one of several in its own colour."""
    train, valid, test = (fig.series(run, kind, "loss") for kind in KINDS)
    smoothed = train[0], smooth(*train, int(SMOOTHING_SHARE * len(train[0])))
    if several:
        name = fig.shortened(run.name, 32)
        kind, held_out = ("valid", valid) if valid[0] else ("test", test)
        lines = [
            fig.Line(name, *smoothed, place, marker=False),
            fig.Line(f"{name}, {kind}", *held_out, place, style="none"),
        ]
    else:
        lines = [
            fig.Line("train (each record)", *train, fig.GREY, marker=False),
            fig.Line(SMOOTHED, *smoothed, fig.BLUE, marker=False),
            fig.Line("valid", *valid, fig.VERMILION, style="none"),
            fig.Line("test", *test, fig.BLACK, style="none"),
        ]
    return [line for line in lines if line.x]


def _perplexity_panel(step: fig.Axis, loss_lines: Sequence[fig.Line]) -> fig.Chart:
    lines = []
    for line in loss_lines:
        kept = [i for i, loss in enumerate(line.y) if loss < MAX_LOSS]
        if kept:
            steps, values = ([each[i] for i in kept] for each in (line.x, line.y))
            lines.append(replace(line, x=steps, y=np.exp(values).tolist()))
    values = [value for line in lines for value in line.y]
    wide = bool(values) and max(values) > LOG_SCALE_FACTOR * min(values)
    y = fig.Axis("perplexity", "log" if wide else "linear")
    return fig.Chart(step, y, lines, title=y.label)


def run_figures(run: fig.Run) -> list[fig.FigureSpec]:
    """Return every figure that the run has data for, training curves last."""
    builders = [build for method in METHODS for build in method.load("figures", "FIGURES", ())]
    return fig.build_figures(run, [*builders, training_figure])


def compared_curves(runs: Sequence[fig.Run]) -> list[fig.FigureSpec]:
    """Return the training curves of several runs over one another, if there are any."""
    names = fig.distinct_names([run.path for run in runs])
    named = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    figure = training_figure(*named)
    return [] if figure is None else [figure]


# -- comparisons ------------------------------------------------------------------------------

FRONTIER = "frontier.json"
COSTS = {
    "milliseconds": ("milliseconds per {unit}", 1.0),
    "layers": ("blocks run per {unit}", 1.0),
    "flops": ("million FLOPs per {unit}", 1e6),
}
"""Key of a cost: what an axis calls it, and by how much its values are divided."""


def read_frontier(folder: Path | str) -> Comparison:
    """Read a comparison from its folder."""
    file = Path(folder) / FRONTIER
    try:
        content = from_fields(Comparison, read_json(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        reason = f"{file} is damaged ({error})"
        raise UserError(f"{reason}: make it again with deepenough compare.") from error
    if not content.points:
        raise UserError(f"{file} has no point with quality and cost: compare again.")
    return content


SHARES = {"milliseconds": "measured time", "flops": "FLOPs"}
"""Costs of the chart of all methods, and what a reader chooses them by."""


def overview_figure(comparisons: Sequence[Comparison]) -> fig.FigureSpec | None:
    """Return quality kept against share of full compute, of all comparisons on one chart.

    Both are relative to the first point of each comparison: the whole model, as it is usually run.
    """
    kept = [found for found in comparisons if found.points[0].quality > 0]
    if not kept:
        return None
    panels = []
    for cost, name in SHARES.items():
        points = [point for found in kept for point in _shares(found, cost, len(kept) > 1)]
        x = fig.Axis(f"share of full compute ({name})", percent=True, low=0.0)
        panels.append(
            fig.Scatter(x, fig.Axis("quality kept", percent=True), points, title=name, key=cost)
        )
    full = "; ".join(f"{found.task.kind}: “{found.name_of(found.points[0])}”" for found in kept)
    caption = f"100 % are the quality and the cost of the whole model ({full}). Further up is "
    caption += f"better, further left is cheaper; thin lines: intervals of {_sure(*kept)}."
    if any(not found.task.higher_is_better for found in kept):
        caption += " Of perplexities, the inverse is compared."
    command = " && ".join(dict.fromkeys(found.command for found in kept))
    about = ("overview", "Quality kept against compute", caption, panels, "", command)
    return fig.FigureSpec(*about, choice="compute", wide=True)


def _shares(found: Comparison, cost: str, several: bool) -> list[fig.Point]:
    """Return the points of a comparison relative to its first."""
    first, points = found.points[0], []
    for row in found.points:
        qualities = (row.quality, row.quality_low, row.quality_high)
        kept = [value / first.quality for value in qualities]
        if not found.task.higher_is_better:
            kept = [first.quality / qualities[place] for place in (0, 2, 1)]
        spent: list[Any] = [row.flops / first.flops, None, None]
        if cost == "milliseconds":
            spent = [row.relative_time, row.relative_time_low, row.relative_time_high]
        told = "{} {:.4g} ({:.4g} to {:.4g})".format(found.task.quality, *qualities)
        points.append(
            fig.Point(
                *(found.name_of(row), spent[0], kept[0], spent[1], spent[2], kept[1], kept[2]),
                group=f"{found.task.kind}: {row.mechanism}" if several else row.mechanism,
                optimal=None,
                details=[told, f"{100 * spent[0]:.3g} % of full compute ({SHARES[cost]})"],
                command=row.command,
                folder=row.folder,
            )
        )
    return points


def frontier_figure(found: Comparison) -> fig.FigureSpec:
    """Return quality against each cost, with intervals and the command of every point."""
    panels = [_cost_panel(found, cost) for cost in COSTS]
    caption = (
        "Larger and bold: no other point is at least as good and cheaper. Thin lines: intervals of "
        f"{_sure(found)}. Every point was timed {found.protocol.get('rounds') or 'several'} times, "
        "in random order. Choose a point to see its command."
    )
    title = f"{found.task.quality} against cost"
    about = (str(found.task), found.command)
    return fig.FigureSpec("frontier", title, caption, panels, *about, choice="cost", wide=True)


def _sure(*comparisons: Comparison) -> str:
    """Return how sure the intervals of quality and time are, as a caption says it."""
    rounds = [found.protocol.get("rounds") for found in comparisons]
    # Of five rounds or fewer not even the slowest and the fastest enclose the median so surely.
    few = any(isinstance(number, int) and number < 6 for number in rounds)
    return f"95 %{', of times the fastest and the slowest round' if few else ''}"


def _cost_panel(found: Comparison, cost: str) -> fig.Scatter:
    label, scale = COSTS[cost]
    points = []
    for row in found.points:
        low, high = (getattr(row, f"{cost}_{end}", None) for end in ("low", "high"))
        interval = f"({row.quality_low:.4g} to {row.quality_high:.4g})"
        details = [f"{found.task.quality} {row.quality:.4g} {interval}"]
        details += [
            f"{text.format(unit=found.task.unit)}: {getattr(row, key) / divisor:.4g}"
            for key, (text, divisor) in COSTS.items()
        ]
        points.append(
            fig.Point(
                name=found.name_of(row),
                x=getattr(row, cost) / scale,
                y=row.quality,
                x_low=None if low is None else low / scale,
                x_high=None if high is None else high / scale,
                y_low=row.quality_low,
                y_high=row.quality_high,
                group=row.mechanism,
                optimal=cost in row.optimal,
                details=details,
                command=row.command,
                folder=row.folder,
            )
        )
    name = label.format(unit=found.task.unit)
    return fig.Scatter(fig.Axis(name), fig.Axis(found.task.quality), points, title=name, key=cost)


def sample_figure(found: Comparison) -> fig.FigureSpec | None:
    """Return the texts that settings generated, every token shaded by the layers it ran."""
    panels: list[fig.TokenText] = []
    for row in found.points:
        sample = row.sample
        if sample is None:
            continue
        key = "" if not panels else str(len(panels) + 1)
        texts = [fig.readable(token) for token in sample.tokens]
        text = fig.TokenText(texts, sample.depth, sample.layers, "layers run", key=key)
        panels.append(replace(text, title=found.name_of(row)))
    if not panels:
        return None
    title = "How deep each token went"
    caption = "What was generated; the prompt is not shaded. Bright: all layers ran."
    about = (str(found.task), found.command)
    return fig.FigureSpec("sample", title, caption, panels, *about, choice="setting", wide=True)


def frontier_section(found: Comparison) -> fig.Section:
    """Return a comparison: its chart, samples, and which setting one would choose."""
    title, protocol = str(found.task), found.protocol
    about = f"{title[:1].upper()}{title[1:]}"
    if protocol.get("processor"):
        threads = protocol.get("threads")
        about += f", measured on {protocol['processor']} with {threads} "
        about += "thread" if threads == 1 else "threads"
    about += f"; measuring itself took {100 * found.bookkeeping:.2g} % of the time"
    sample = sample_figure(found)
    figures = [frontier_figure(found)] + ([] if sample is None else [sample])
    told = (m.load("verdicts", "comparison_findings", lambda _: None)(found) for m in METHODS)
    findings = next(filter(None, told), None) or [_choice(found)]
    return fig.Section("Comparison", f"{about}.", findings, figures)


def _choice(found: Comparison) -> str:
    """Name the best setting, and the fastest of the faster ones that are not told from it.

    Only whole intervals tell one setting from another, in quality as in time.
    """
    sign = 1.0 if found.task.higher_is_better else -1.0
    best = max(found.points, key=lambda row: (sign * row.quality, -row.milliseconds))
    alike = [
        row
        for row in found.points
        if row.quality_low <= best.quality_high and best.quality_low <= row.quality_high
    ]
    said = f"Best {found.task.quality}: {best.quality:.4g}"
    if found.task.quality == "agreement" and best.quality == 1.0:
        said = "All tokens identical"
    said += f" with “{found.name_of(best)}”"
    first = found.points[0]
    if best is not first:
        times, *ends = best.times_as_fast(first)
        said += f", {shown(times, ends)} times as fast as “{found.name_of(first)}”"
    quicker = [row for row in alike if row.times_as_fast(best)[1] > 1]
    if not quicker:
        return f"{said}. No other setting of the same quality is significantly faster."
    fastest = min(quicker, key=lambda row: row.relative_time)
    times, *ends = fastest.times_as_fast(best)
    said += f". “{found.name_of(fastest)}” is not significantly worse ({found.task.quality} "
    said += f"{fastest.quality:.4g}) and {shown(times, ends)} times as fast"
    layers, all_layers = f"{fastest.layers:.1f}", f"{best.layers:.1f}"
    if layers != all_layers:
        said += f", with {layers} instead of {all_layers} blocks per {found.task.unit}"
    return f"{said}."
