"""Figures of pondering: accuracy against passes, passes made, and the parity experiment.

Built from a run's records alone. A run may have been measured several times: the last evaluation
counts. Records that lack something are left out.
"""

import contextlib
import math
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from deepenough import figure as fig

HEADING = "Ponder"
EXIT, PASSES, PARITY = "ponder_exit", "ponder_passes", "parity"
"""Kinds of the records that are read here."""

POLICIES = {
    "quantile": ("halting probability", fig.BLUE, "solid"),
    "confidence": ("confidence", fig.GREEN, "solid"),
    "patience": ("patience", fig.SKY, "dashed"),
    "fixed": ("fixed number of passes", fig.GREY, "dotted"),
}
"""Name, colour and style of the line of each way to stop."""
MECHANISMS = {"ponder": "PonderNet", "act": "ACT", "fixed": "fixed depth"}
DEPTH_SHOWN = 0.12
"""Accuracies further than this below the best are cut off: answers after the first pass would
press everything of interest together."""
CHANCE = 0.5


# -- records ----------------------------------------------------------------------------------


class PolicyPoint(NamedTuple):
    """What one setting of one way to stop has reached."""

    policy: str
    passes: float
    score: float
    metric: str = "accuracy"


class ParityBand(NamedTuple):
    """Results on parity inputs of similar difficulty."""

    lowest: float
    highest: float
    accuracy: float
    passes: float
    beyond: bool
    """Harder than every input of training."""
    mechanism: str


def exit_points(run: fig.Run) -> list[PolicyPoint]:
    """Return every measured setting of a way to stop."""
    found = []
    for values in _latest(run, EXIT):
        policy, metric = str(values.get("policy")), str(values.get("metric", "accuracy"))
        read = fig.numbers(values, "passes", metric)
        if read is not None and policy in POLICIES:
            passes, score = read
            found.append(PolicyPoint(policy, passes, score, metric))
    return found


def parity_bands(run: fig.Run) -> list[ParityBand]:
    """Return the results on parity by rising difficulty."""
    found = []
    for record in run.of_kind(PARITY):
        values = record.values
        read = fig.numbers(values, "lowest", "highest", "accuracy", "passes")
        if read is not None:
            lowest, highest, accuracy, passes = read
            mechanism, beyond = str(values.get("mechanism", run.name)), values.get("beyond") is True
            found.append(ParityBand(lowest, highest, accuracy, passes, beyond, mechanism))
    return sorted(found, key=lambda band: band.lowest)


def _latest(run: fig.Run, kind: str) -> list[dict[str, Any]]:
    """Return the values of the records of a kind from the last evaluation."""
    found = [record.values for record in run.of_kind(kind)]
    order = [fig.number(values.get("evaluation")) or 0.0 for values in found]
    return [v for v, own in zip(found, order, strict=True) if own == max(order)]


def _array(value: Any) -> np.ndarray:
    """Return an array of numbers; ValueError if one is negative or not finite, or all are 0."""
    array = np.array(value, dtype=float)
    if not np.isfinite(array).all() or (array < 0).any() or not array.any():
        raise ValueError
    return array


# -- figures ----------------------------------------------------------------------------------


def frontier_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return accuracy against mean passes for every way of stopping."""
    points = exit_points(run)
    if not points:
        return None
    lines = []
    for policy, (name, color, style) in POLICIES.items():
        own = sorted((p for p in points if p.policy == policy), key=lambda p: p.passes)
        if own:
            passes, scores = [p.passes for p in own], [p.score for p in own]
            lines.append(fig.Line(name, passes, scores, color, style))
    top, bottom = (pick(p.score for p in points) for pick in (max, min))
    metric = points[0].metric
    low = max(bottom, top - DEPTH_SHOWN)
    caption = "Each point is one setting of one way to stop; passes are the mean over examples."
    if bottom < low:
        caption += f" Settings below {low:.0%} {metric} are not shown."
    y = fig.Axis(metric, percent=True, low=low - 0.004, high=top + 0.006)
    chart = fig.Chart(fig.Axis("mean passes", whole=True), y, lines)
    title = f"{metric.capitalize()} against mean passes"
    return _figure(run, "ponder_frontier", title, caption, [chart])


def passes_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return how many passes examples make, by label and by difficulty."""
    panels = []
    for values in _latest(run, PASSES):
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):  # a bad record
            panels.append(_pass_panel(values))
    caption = (
        "How many passes examples make, as a share of their group. An example is as difficult as "
        "the pass from which its answer stays the same."
    )
    return _figure(run, "passes", "Passes made", caption, panels, columns=2, wide=True)


def _pass_panel(values: dict[str, Any]) -> fig.HeatMap:
    """Return the shares of examples that made 1, 2, ... passes, a row for every group with any."""
    counts = _array(values["counts"])
    rows = zip(values["groups"], counts, counts.sum(axis=1), strict=True)
    kept = [(str(name), own / total, total) for name, own, total in rows if total]
    by_label = values.get("by") == "label"
    return fig.HeatMap(
        [f"{fig.shortened(name, 16)} ({total:g})" for name, _, total in kept],
        [str(place + 1) for place in range(counts.shape[1])],
        [shares.tolist() for _, shares, _ in kept],
        fig.Axis("passes made"),
        fig.Axis("" if by_label else "answer settled at pass"),
        fig.Axis("share of the row", percent=True, low=0.0, high=1.0),
        texts=[[f"{part:.0%}" if part >= 0.005 else "" for part in own] for _, own, _ in kept],
        title=f"by {'label' if by_label else 'difficulty'} (examples)",
    )


def parity_figure(run: fig.Run) -> fig.FigureSpec | None:
    """Return accuracy and passes by difficulty of the parity experiment."""
    bands = parity_bands(run)
    if not bands:
        return None
    name = MECHANISMS.get(bands[0].mechanism, fig.shortened(bands[0].mechanism))
    middles = [(band.lowest + band.highest) / 2 for band in bands]
    beyond = [band for band in bands if band.beyond]
    spans = []
    if beyond:
        low, high = beyond[0].lowest - 0.5, beyond[-1].highest + 0.5
        spans.append(fig.Span(low, high, "harder than in training"))
    x = fig.Axis(
        "entries that are not zero", low=bands[0].lowest - 0.5, high=bands[-1].highest + 0.5
    )
    y, chance = (
        fig.Axis("accuracy", percent=True, low=0.44, high=1.02),
        [fig.Rule(CHANCE, "chance")],
    )
    lines = [fig.Line(name, middles, [band.accuracy for band in bands])]
    accuracy = fig.Chart(x, y, lines, rules=chance, spans=spans, title="accuracy")
    lines = [fig.Line(name, middles, [band.passes for band in bands])]
    passes = fig.Chart(x, fig.Axis("passes", low=0.0), lines, spans=spans, title="passes")
    caption = "Measured on vectors that were not trained on; the more entries are not zero, the "
    caption += "harder a vector is."
    panels, title = [accuracy, passes], "Parity by difficulty"
    return _figure(run, "parity", title, caption, panels, columns=2, wide=True)


def _figure(
    run: fig.Run, name: str, title: str, caption: str, panels: Sequence[fig.Panel], **layout: Any
) -> fig.FigureSpec | None:
    """Return a figure of these panels, None without any."""
    if not panels:
        return None
    measured = f"deepenough ponder eval {shlex.quote(run.path)}"
    command = training_command(run) if name == "parity" else measured
    return fig.FigureSpec(name, title, caption, panels, run.name, command, **layout)


FIGURES: tuple[fig.FigureBuilder, ...] = (frontier_figure, passes_figure, parity_figure)


def training_command(run: fig.Run) -> str:
    """Return the command that trains the run again."""
    verb = "parity" if run.of_kind(PARITY) else "train"
    return f"deepenough ponder {verb} --config {shlex.quote(f'{run.path}/config.yaml')}"


# -- section ----------------------------------------------------------------------------------


def section(run: fig.Run) -> fig.Section | None:
    """Return what a pondering model has recorded, or None if there is nothing."""
    figures = fig.build_figures(run, FIGURES)
    if not figures:
        return None
    about = "Every example takes as many passes as the network decides, up to a limit."
    bands = parity_bands(run)
    if bands:
        about = "Is the number of ones among the entries 1, 0 and -1 odd?"
        if bands[0].mechanism != "fixed":
            about += " The network itself decides how many passes it takes."
    findings = [*_exit_findings(run), *_parity_findings(bands), *_longer_findings(run, bands)]
    return fig.Section(HEADING, about, findings, figures, fig.LONG)


def _exit_findings(run: fig.Run) -> list[str]:
    points = exit_points(run)
    if not points:
        return []
    full = max(points, key=lambda p: p.passes)
    quick = min((p for p in points if p.score >= full.score), key=lambda p: p.passes)
    name = full.metric.capitalize()
    found = f"{name} {100 * full.score:.1f} % with {full.passes:.2f} passes"
    if quick.passes < full.passes:
        way = POLICIES[quick.policy][0]
        return [f"{found}; at least as accurate with {quick.passes:.2f} passes (by {way})."]
    return [f"{found}; no setting that stops earlier is as accurate."]


def _parity_findings(bands: Sequence[ParityBand]) -> list[str]:
    found = []
    for what, beyond in (("as hard as in training", False), ("harder than any in training", True)):
        own = [band for band in bands if band.beyond is beyond]
        if own:
            accuracy = float(np.mean([band.accuracy for band in own]))
            passes = float(np.mean([band.passes for band in own]))
            found.append(
                f"Parity of vectors {what}: {100 * accuracy:.1f} % correct in {passes:.1f} passes "
                "on average."
            )
    return found


def _longer_findings(run: fig.Run, bands: Sequence[ParityBand]) -> list[str]:
    """Say whether harder inputs take more passes, or fewer, where one of the two is significant.

    Difficulty is a number of entries, or the pass at which the answer settles; the correlation with
    the passes made has to differ from 0 by twice its standard error.
    """
    pairs, weights = np.array([(band.lowest, band.passes) for band in bands]), np.ones(len(bands))
    of, what = "vectors", "entries that are not zero"
    if bands and bands[0].mechanism == "fixed":
        return []
    for values in _latest(run, PASSES):
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):
            if values["by"] == "difficulty":
                counts = _array(values["counts"])
                pairs, weights = np.argwhere(np.ones(counts.shape)), counts.ravel()
                of, what = "examples", "the pass that settles the answer"
    if weights.sum() < 4:
        return []
    (hard, both), (_, passes) = np.cov(pairs.T, aweights=weights, bias=True)
    if not hard * passes > 0:
        return []
    found = both / math.sqrt(hard * passes)
    ends = found + 2 * math.sqrt(max(1 - found**2, 0.0) / (weights.sum() - 2)) * np.array([-1, 1])
    if ends[0] <= 0 <= ends[1]:
        return []
    return [
        f"It computes {'longer' if found > 0 else 'shorter'} on harder {of}: the correlation of "
        f"{what} with passes made is {found:.2f} ({max(-1, ends[0]):.2f} to {min(1, ends[1]):.2f})."
    ]
