"""Figures that belong to no single method: training curves, and the frontier of a comparison.

Notable choices:

- The training line is smoothed in the loss, and its perplexity is the exponential of that: the
  mean of per-batch perplexities is dominated by the worst batches and is no perplexity of
  anything.
- Several runs share each panel, one colour a run; a panel that no run has data for is left out.
- A point of a comparison is Pareto-optimal when no other is at least as good in both quality and
  cost and better in one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepenough.errors import UserError
from deepenough.figure import (
    BLACK,
    BLUE,
    GREY,
    VERMILION,
    Axis,
    Chart,
    FigureSpec,
    Line,
    Panel,
    Point,
    Run,
    Scatter,
    Section,
    TokenText,
    number,
    readable,
    series,
    shortened,
)

# -- training curves --------------------------------------------------------------------------

Curve = tuple[np.ndarray, np.ndarray]

SMOOTHING_SHARE = 0.025
"""The smoothing looks over this share of the records to either side."""
LOG_SCALE_FACTOR = 4.0
"""A perplexity that falls by more than this factor needs a logarithmic scale to be seen whole."""
MAX_LOSS = 100.0
"""exp() of more than this is no number that a panel can show."""

KINDS = ("train", "valid", "test")
SMOOTHED = "train (smoothed)"
SMALL_PANELS = (
    ("tau", Axis("temperature", low=0.0)),
    ("lr", Axis("learning rate", low=0.0)),
    ("entropy", Axis("entropy of the search (0: decided)", low=0.0, high=1.0)),
)


def smooth(steps: np.ndarray, values: np.ndarray, half_window: int) -> np.ndarray:
    """Replace every value by the line fitted to it and `half_window` neighbours to either side.

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


def losses(run: Run, kind: str) -> Curve:
    """Return the loss per step; a record with a perplexity alone counts by its logarithm."""
    steps, values = map(np.array, series(run, kind, "loss"))
    if not len(steps):
        steps, values = map(np.array, series(run, kind, "perplexity"))
        steps, values = steps[values > 0], np.log(values[values > 0])
    return steps, values


def training_figure(*runs: Run, command: str = "") -> FigureSpec | None:
    """Return the curves of one run, or of several over one another; None without any curve."""
    several = len(runs) > 1
    step = Axis("step", whole=True, low=0.0)
    panels: list[Panel] = []
    lines = [
        line
        for place, run in enumerate(runs)
        for line in (_run_lines(run, place) if several else _loss_lines(run))
    ]
    if lines:
        panels.append(Chart(step, Axis("loss"), lines, title="loss"))
        if any(series(run, kind, "perplexity")[0] for run in runs for kind in KINDS):
            panels.append(_perplexity_panel(step, lines))
    for name, axis in SMALL_PANELS:
        curves = [
            Line(shortened(run.name, 32) if several else SMOOTHED, x, y, place, marker=False)
            for place, run in enumerate(runs)
            if (x := (found := series(run, "train", name))[0]) and (y := found[1])
        ]
        if curves:
            panels.append(Chart(step, axis, curves, title=axis.label))
    if not panels:
        return None
    caption = "As recorded while training; the training loss is smoothed."
    subject = ", ".join(run.name for run in runs)
    return FigureSpec("training", "Training curves", caption, panels, subject, command, wide=True)


def _loss_lines(run: Run) -> list[Line]:
    """Return the losses of a run that is shown alone."""
    lines = [
        _line("train (each record)", losses(run, "train"), GREY, marker=False),
        _line(SMOOTHED, _smoothed(run), BLUE, marker=False),
        _line("valid", losses(run, "valid"), VERMILION, style="none"),
        _line("test", losses(run, "test"), BLACK, style="none"),
    ]
    return [line for line in lines if line.x]


def _run_lines(run: Run, place: int) -> list[Line]:
    """Return the losses of one of several runs, in its own colour."""
    name = shortened(run.name, 32)
    kind = "valid" if len(losses(run, "valid")[0]) else "test"
    lines = [
        _line(name, _smoothed(run), place, marker=False),
        _line(f"{name}, {kind}", losses(run, kind), place, style="none"),
    ]
    return [line for line in lines if line.x]


def _smoothed(run: Run) -> Curve:
    steps, values = losses(run, "train")
    return steps, smooth(steps, values, int(SMOOTHING_SHARE * len(values)))


def _line(name: str, curve: Curve, color: int, **look: Any) -> Line:
    return Line(name, curve[0].tolist(), curve[1].tolist(), color, **look)


def _perplexity_panel(step: Axis, loss_lines: Sequence[Line]) -> Chart:
    lines = []
    for line in loss_lines:
        kept = [i for i, loss in enumerate(line.y) if loss < MAX_LOSS]
        if kept:
            steps, values = ([each[i] for i in kept] for each in (line.x, line.y))
            lines.append(replace(line, x=steps, y=np.exp(values).tolist()))
    values = [value for line in lines for value in line.y]
    wide = bool(values) and max(values) > LOG_SCALE_FACTOR * min(values)
    return Chart(step, Axis("perplexity", "log" if wide else "linear"), lines, title="perplexity")


# -- comparisons ------------------------------------------------------------------------------

FRONTIER_FILE = "frontier.json"
COSTS = {
    "milliseconds": ("milliseconds per {unit}", 1.0),
    "layers": ("blocks run per {unit}", 1.0),
    "flops": ("million FLOPs per {unit}", 1e6),
}
"""Key of a cost: what an axis calls it, and by how much its values are divided."""
_NEEDED = ("quality", "quality_low", "quality_high", *COSTS)


@dataclass(frozen=True)
class Frontier:
    """A comparison as its file shows it."""

    name: str
    task: Mapping[str, Any]
    points: tuple[Mapping[str, Any], ...]
    content: Mapping[str, Any]
    """All of the file."""

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return what a point is called: with its run, where there are several."""
        name, run = str(row.get("name", "")), str(row.get("run", ""))
        several = len({point.get("run") for point in self.points}) > 1
        return f"{run} {name}".strip() if several else name or run

    @property
    def quality(self) -> str:
        """The name of the measure of quality."""
        return str(self.task.get("quality", "quality"))

    @property
    def higher_is_better(self) -> bool:
        """Whether a greater value of quality is better."""
        return self.task.get("higher_is_better") is True

    @property
    def unit(self) -> str:
        """What costs are counted for: a token, an example, a sentence."""
        return str(self.task.get("unit", "unit"))

    @property
    def title(self) -> str:
        """What was measured, on which data."""
        parts = (self.task.get(name, "?") for name in ("kind", "data", "split"))
        return "{} of {} ({})".format(*parts)


def read_frontier(path: Path | str) -> Frontier:
    """Read a comparison from its file or folder; points that lack a number are left out."""
    file = Path(path) / FRONTIER_FILE if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: make it again with deepenough compare.") from error
    task = content.get("task") if isinstance(content, dict) else None
    rows = content.get("points") if isinstance(content, dict) else None
    if not isinstance(task, dict) or not isinstance(rows, list):
        raise UserError(f"{file} is no comparison: give what deepenough compare has written.")
    points = tuple(row for row in rows if isinstance(row, dict) and _complete(row))
    if not points:
        raise UserError(f"{file} has no point with quality and cost: compare again.")
    return Frontier(file.resolve().parent.name, task, points, content)


def _complete(row: Mapping[str, Any]) -> bool:
    return all(number(row.get(name)) is not None for name in _NEEDED)


def frontier_figure(frontier: Frontier) -> FigureSpec:
    """Return quality against each cost, with intervals and the command of every point."""
    panels = [_cost_panel(frontier, cost) for cost in COSTS]
    protocol = frontier.content.get("protocol", {})
    caption = (
        "Larger and bold: no other point is at least as good and cheaper. Thin lines: intervals of "
        f"{100 * (number(protocol.get('confidence')) or 0.95):g} %. Every point was timed "
        f"{protocol.get('rounds', '?')} times, in random order. Choose a point to see its command."
    )
    return FigureSpec(
        "frontier", f"{frontier.quality} against cost", caption, panels, frontier.title,
        compare_command(frontier), choice="cost", wide=True,
    )  # fmt: skip


def _cost_panel(frontier: Frontier, cost: str) -> Scatter:
    label, scale = COSTS[cost]
    points = []
    for row in frontier.points:
        low, high = (number(row.get(f"{cost}_{end}")) for end in ("low", "high"))
        details = [f"{frontier.quality} {row['quality']:.4g} "
                   f"({row['quality_low']:.4g} to {row['quality_high']:.4g})"]  # fmt: skip
        details += [
            f"{text.format(unit=frontier.unit)}: {row[key] / divisor:.4g}"
            for key, (text, divisor) in COSTS.items()
        ]
        optimal = row.get("optimal")
        points.append(
            Point(
                name=frontier.name_of(row),
                x=row[cost] / scale,
                y=row["quality"],
                x_low=None if low is None else low / scale,
                x_high=None if high is None else high / scale,
                y_low=row["quality_low"],
                y_high=row["quality_high"],
                group=str(row.get("mechanism", "")),
                optimal=isinstance(optimal, list) and cost in optimal,
                details=details,
                command=str(row.get("command") or ""),
                folder=str(row.get("folder") or row.get("run", "")),
            )
        )
    name = label.format(unit=frontier.unit)
    return Scatter(Axis(name), Axis(frontier.quality), points, title=name, key=cost)


def sample_figure(frontier: Frontier) -> FigureSpec | None:
    """Return the texts that settings generated, every token shaded by the layers it ran."""
    panels: list[TokenText] = []
    for row in frontier.points:
        sample = row.get("sample")
        if not isinstance(sample, dict):
            continue
        tokens, depth, last = sample.get("tokens"), sample.get("depth"), sample.get("layers")
        if not isinstance(tokens, list) or not isinstance(depth, list) or not isinstance(last, int):
            continue
        if len(tokens) != len(depth) or not tokens or last < 1:
            continue
        key = "" if not panels else str(len(panels) + 1)
        texts = [readable(str(token)) for token in tokens]
        depths = list(map(number, depth))
        title = frontier.name_of(row)
        panels.append(TokenText(texts, depths, last, "layers run", title=title, key=key))
    if not panels:
        return None
    caption = "What was generated; the prompt is not shaded. Bright: all layers ran."
    return FigureSpec(
        "sample", "How deep each token went", caption, panels, frontier.title,
        compare_command(frontier), choice="setting", wide=True,
    )  # fmt: skip


def compare_command(frontier: Frontier) -> str:
    """Return the command that measures the comparison again."""
    command = frontier.content.get("command")
    if isinstance(command, str) and command:
        return command
    settings = frontier.content.get("provenance", {}).get("settings", {})
    runs = settings.get("runs") if isinstance(settings, dict) else None
    if isinstance(runs, list) and runs:
        words = [*map(str, runs), "--out", str(settings.get("out", ""))]
        return "deepenough compare " + shlex.join(words)
    return "deepenough compare --config comparison.yaml"


def frontier_section(frontier: Frontier) -> Section:
    """Return a comparison: its chart, samples, and which setting one would choose."""
    figures = [frontier_figure(frontier)]
    sample = sample_figure(frontier)
    figures += [] if sample is None else [sample]
    return Section("Frontier", _about(frontier), [_choice(frontier)], figures)


def _about(frontier: Frontier) -> str:
    """Return what was measured, and where."""
    said = f"{frontier.title[:1].upper()}{frontier.title[1:]}"
    protocol = frontier.content.get("protocol", {})
    if protocol.get("processor"):
        threads = protocol.get("threads", "?")
        said += f", measured on {protocol['processor']} with {threads} thread(s)"
    overhead = number(frontier.content.get("bookkeeping"))
    if overhead is not None:
        said += f"; measuring itself took {100 * overhead:.2g} % of the time"
    return f"{said}."


def _choice(frontier: Frontier) -> str:
    """Name the best setting, and the fastest that the intervals do not tell from it."""
    sign = 1.0 if frontier.higher_is_better else -1.0
    best = max(frontier.points, key=lambda row: (sign * row["quality"], -row["milliseconds"]))
    alike = [
        row
        for row in frontier.points
        if row["quality_low"] <= best["quality_high"] and best["quality_low"] <= row["quality_high"]
    ]
    fastest = min(alike, key=lambda row: row["milliseconds"])
    said = f"Best {frontier.quality}: {best['quality']:.4g}, by “{frontier.name_of(best)}”"
    first = frontier.points[0]
    if best is not first:
        ratio = first["milliseconds"] / best["milliseconds"]
        said += f", {_times(ratio)} “{frontier.name_of(first)}”"
    if fastest is best:
        return f"{said}. No other setting of the same quality is faster."
    ratio = best["milliseconds"] / fastest["milliseconds"]
    return (
        f"{said}. “{frontier.name_of(fastest)}” is not significantly worse ({frontier.quality} "
        f"{fastest['quality']:.4g}) and {ratio:.2f}x as fast, with {fastest['layers']:.1f} instead "
        f"of {best['layers']:.1f} blocks per {frontier.unit}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x as fast as"
