"""Pondering in a report: accuracy against passes, how many passes, examples, parity."""

from __future__ import annotations

import shlex

from deepenough.report.page_parts import Limits, Part, Shown, line, plain
from deepenough.report.ponder import MODELS, POLICIES
from deepenough.report.ponder_source import (
    exit_points,
    halting_examples,
    parity_bands,
    pass_tables,
)
from deepenough.report.source import Run


def ponder_part(run: Run, path: str, limits: Limits) -> Part | None:
    """A classifier that ponders."""
    command = f"deepenough ponder eval {shlex.quote(path)}"
    part = Part("Ponder", about="Every example takes as many passes as it needs, up to a limit.")
    part.figures += [*_exits(run, command, limits), *_passes(run, command)]
    part.figures += _examples(run, command)
    if not part.figures:
        return None
    points = exit_points(run)
    if points:
        full = max(points, key=lambda p: p.passes)
        alike = [p for p in points if p.accuracy >= full.accuracy]
        quick = min(alike, key=lambda p: p.passes)
        part.summary.append(
            f"Accuracy {100 * full.accuracy:.1f} % with {full.passes:.2f} passes; at least as good "
            f"with {quick.passes:.2f}, by {POLICIES.get(quick.policy, quick.policy)}."
        )
    return part


def _exits(run: Run, command: str, limits: Limits) -> list[Shown]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in exit_points(run):
        name = f"{MODELS.get(point.model, point.model)}, {POLICIES.get(point.policy, point.policy)}"
        lines.setdefault(name, []).append((point.passes, point.accuracy))
    if not lines:
        return []
    series = []
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        series.append(line(name, xs, ys, limits))
    data = {"x_label": "mean passes", "y_label": "accuracy", "series": series}
    caption = "Each point is one setting of one way to stop."
    return [Shown("lines", "Accuracy against passes", caption, command, data)]


def _passes(run: Run, command: str) -> list[Shown]:
    found = []
    for table in pass_tables(run):
        counts = [row for row in table.counts if row.sum() > 0]
        names = [n for n, row in zip(table.groups, table.counts, strict=True) if row.sum() > 0]
        if not counts:
            continue
        settled = table.by == "difficulty"
        series = [
            {"name": f"settled at pass {n}" if settled else n, "values": plain(row)}
            for n, row in zip(names, counts, strict=True)
        ]
        labels = [str(number) for number in range(1, table.counts.shape[1] + 1)]
        data = {"x_label": "passes", "y_label": "examples", "labels": labels, "series": series}
        by = "by difficulty" if settled else "by label"
        caption = "How many examples stopped after how many passes"
        caption += ", by the pass from which on their answer stayed." if settled else "."
        found.append(Shown("bars", f"Passes made, {by}", caption, command, data))
    return found


def _examples(run: Run, command: str) -> list[Shown]:
    examples = halting_examples(run)
    widest = max((len(e.halting) for e in examples), default=0)
    examples = [e for e in examples if len(e.halting) == widest]
    if not examples:
        return []
    data = {
        "rows": [f"{place}" for place in range(1, len(examples) + 1)],
        "columns": [str(number) for number in range(1, widest + 1)],
        "values": [plain(e.halting, 3) for e in examples],
        "low": 0.0,
        "high": 1.0,
        "row_name": "example",
        "column_name": "pass",
        "value_name": "probability of stopping there",
        "x_label": "pass",
        "y_label": "example",
    }
    texts = "; ".join(f"{place}: “{_short(e.text)}”" for place, e in enumerate(examples, 1))
    return [Shown("heat", "When examples stop", texts, command, data)]


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def parity_part(run: Run, path: str, limits: Limits) -> Part | None:
    """The parity experiment: accuracy and passes by difficulty."""
    bands = parity_bands(run)
    if not bands:
        return None
    labels = [f"{b.lowest}–{b.highest}" if b.highest > b.lowest else f"{b.lowest}" for b in bands]
    command = f"deepenough ponder parity --config {shlex.quote(f'{path}/config.yaml')}"
    part = Part(
        "Ponder",
        about="Is the number of ones among the entries 1, 0 and -1 odd?"
        + (
            ""
            if bands[0].mechanism == "fixed"
            else " The network itself decides how many passes it takes."
        ),
    )
    for name, title in (("accuracy", "Accuracy by difficulty"), ("passes", "Passes by difficulty")):
        seen = [plain(getattr(b, name)) if not b.beyond else None for b in bands]
        beyond = [plain(getattr(b, name)) if b.beyond else None for b in bands]
        series = [{"name": "as in training", "values": seen}]
        if any(b.beyond for b in bands):
            series.append({"name": "harder than in training", "values": beyond})
        data = {"x_label": "entries that are not zero", "y_label": name, "labels": labels}
        caption = "Measured on vectors that were not trained on."
        part.figures.append(Shown("bars", title, caption, command, data | {"series": series}))
    for told, chosen in (("as hard as in training", False), ("harder than any of them", True)):
        of = [b for b in bands if b.beyond is chosen]
        if of:
            accuracy = sum(b.accuracy for b in of) / len(of)
            passes = sum(b.passes for b in of) / len(of)
            part.summary.append(
                f"Parity {told}: {100 * accuracy:.1f} % right in {passes:.1f} passes on average."
            )
    return part
