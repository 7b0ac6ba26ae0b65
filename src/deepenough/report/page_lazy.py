"""A Lazy Transformer in a report: how far states still move, when tokens rest, what that saves."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from deepenough.report.lazy_source import (
    Side,
    epsilon_points,
    last_look,
    last_rest,
    step_grid,
    words_of,
)
from deepenough.report.lens_words import visible
from deepenough.report.page_parts import Limits, Part, Shown, line, plain
from deepenough.report.source import Run, number

PROGRAMS = "programs"
"""Kind of the records that tell how many programs were executed rightly."""


def lazy_part(run: Run, path: str, limits: Limits) -> Part | None:
    """Whatever a lazy model has recorded; a record that lacks something is left out."""
    part = Part(
        "Lazy",
        about="One block is applied again and again; its gate says how far a token's state would "
        "still turn, and tokens at rest cost nothing more.",
    )
    for make in (_tokens, _similarity, _rest, _grid, _epsilons, _programs):
        part.figures += _or_nothing(make, run, path, limits)
    if not part.figures:
        return None
    part.summary += _or_nothing(_verdicts, run, path, limits)
    look = last_look(run)
    longest = max((len(side.tokens) for side in look.sides), default=0) if look else 0
    if longest > limits.tokens:
        part.thinned.append(f"the first {limits.tokens} of {longest} tokens")
    return part


def _or_nothing(
    make: Callable[[Run, str, Limits], list[Any]], run: Run, path: str, limits: Limits
) -> list[Any]:
    try:
        return make(run, path, limits)
    except (KeyError, TypeError, ValueError, IndexError):
        return []


def _tokens(run: Run, path: str, limits: Limits) -> list[Shown]:
    look = last_look(run)
    if look is None:
        return []
    words = [path, "--source", look.source, "--target", look.target]
    words += [] if look.epsilon is None else ["--epsilon", f"{look.epsilon:g}"]
    command = f"deepenough lazy plot {shlex.join(words)}"
    found: list[Shown] = []
    for side, which in zip(look.sides, look.names, strict=True):
        found += _side(side, which, command, limits)
    return found


def _side(side: Side, which: str, command: str, limits: Limits) -> list[Shown]:
    tables = {"similarity": (side.similarity, "squared cosine to the step before")}
    if side.gates is not None:
        tables["gate"] = (side.gates, "gate")
    tokens = [visible(token) for token in side.tokens[: limits.tokens]]
    found = []
    for name, (table, value_name) in tables.items():
        values = table[: limits.tokens]
        data = {
            "rows": tokens,
            "columns": [str(step) for step in range(1, values.shape[1] + 1)],
            "values": plain(values, 3),
            "low": 0.0,
            "high": 1.0,
            "row_name": "token",
            "column_name": "step",
            "value_name": value_name,
            "x_label": "step",
            "y_label": "",
            "row_width": 96,
            "cell_height": 24,
        }
        caption = (
            "Bright: the token no longer moves."
            if name == "similarity"
            else ("How much of what the block proposes is taken.")
        )
        found.append(Shown("heat", f"Tokens of the {which}: {name}", caption, command, data))
    if side.depth is not None:
        data = {
            "tokens": tokens,
            "depth": [int(depth) for depth in side.depth[: limits.tokens]],
            "last": side.similarity.shape[1],
            "depth_name": "steps until at rest",
        }
        title = f"Tokens of the {which}, shaded by their steps"
        found.append(Shown("tokens", title, "Dark tokens rest early.", command, data, wide=True))
    return found


def _similarity(run: Run, path: str, limits: Limits) -> list[Shown]:
    """How like itself the mean of many stays from step to step, and the pair that was looked at."""
    look, many = last_look(run), last_rest(run)
    series = []
    if many is not None:
        own = many["similarity"]
        name = f"mean of {many['sentences']} {words_of(many).sources}"
        series.append(line(name, range(1, len(own) + 1), own, limits))
    if look is not None:
        for side, name in zip(look.sides, look.names, strict=True):
            own = side.sentence
            series.append(line(f"this {name}", range(1, len(own) + 1), own, limits, dashed=True))
    if not series:
        return []
    data = {"x_label": "step", "y_label": "similarity to the state before", "series": series}
    caption = "Squared cosine of the mean state before and after each step; at 1 nothing moves."
    title = "How much is still moving"
    return [Shown("lines", title, caption, _plot(path, many), data)]


def _rest(run: Run, path: str, limits: Limits) -> list[Shown]:
    """After how many steps tokens rest."""
    many = last_rest(run)
    if many is None or "tokens_by_steps" not in many:
        return []
    counts = [int(count) for count in many["tokens_by_steps"]]
    words = words_of(many)
    data = {
        "x_label": f"steps that a token of the {words.source} makes",
        "y_label": "tokens",
        "labels": [str(step) for step in range(1, len(counts) + 1)],
        "series": [{"name": words.sources, "values": counts}],
    }
    caption = (
        f"Tokens of {many['sentences']} {words.sources}, with epsilon {many['epsilon']:g}. Those "
        "of the last step need not rest: there was no more."
    )
    return [Shown("bars", "When tokens come to rest", caption, _plot(path, many), data)]


def _plot(path: str, many: dict[str, Any] | None) -> str:
    words = [path]
    if many is not None:
        words += ["--sentences", str(many["sentences"])]
        words += [] if "epsilon" not in many else ["--epsilon", f"{many['epsilon']:g}"]
    return f"deepenough lazy plot {shlex.join(words)}"


def _grid(run: Run, path: str, limits: Limits) -> list[Shown]:
    grid = step_grid(run)
    rows, columns = sorted({key[0] for key in grid}), sorted({key[1] for key in grid})
    if not grid:
        return []
    values = [[plain(grid.get((row, column))) for column in columns] for row in rows]
    known = [value for value in grid.values() if number(value) is not None]
    data = {
        "rows": [str(row) for row in rows],
        "columns": [str(column) for column in columns],
        "values": values,
        "low": plain(min(known)),
        "high": plain(max(known)),
        "row_name": "encoder steps",
        "column_name": "decoder steps",
        "value_name": "BLEU",
        "x_label": "decoder steps",
        "y_label": "encoder steps",
        "upwards": True,
    }
    command = _sweep(path, encoder_steps=rows, decoder_steps=columns, epsilons=[])
    caption = "The same weights, run for more or fewer steps than they were trained with."
    return [Shown("heat", "BLEU for other steps", caption, command, data)]


def _epsilons(run: Run, path: str, limits: Limits) -> list[Shown]:
    points = epsilon_points(run)
    if not points:
        return []
    pairs = sorted((point["encoder_flops"] / 1e9, point["bleu"]) for point in points)
    series = [line("BLEU", [x for x, _ in pairs], [y for _, y in pairs], limits)]
    data = {"x_label": "GFLOPs of the encoder", "y_label": "BLEU", "series": series}
    command = _sweep(path, encoder_steps=[], epsilons=[point["epsilon"] for point in points])
    caption = "Tokens stop when what still changes falls below epsilon; each point is one epsilon."
    return [Shown("lines", "BLEU against the encoder's FLOPs", caption, command, data)]


def _sweep(path: str, **lists: list[Any]) -> str:
    words = [path]
    for name, values in lists.items():
        words += [f"--{name}", f"[{','.join(f'{value:g}' for value in values)}]"]
    return f"deepenough lazy sweep {shlex.join(words)}"


def _programs(run: Run, path: str, limits: Limits) -> list[Shown]:
    record = next((r for r in reversed(run.records) if r.kind == PROGRAMS), None)
    if record is None:
        return []
    rows = record.values["exact_by"]
    lengths = sorted({int(row["length"]) for row in rows})
    series = []
    for kind in dict.fromkeys(str(row["kind"]) for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        series.append({"name": kind, "values": [_exact(own, length) for length in lengths]})
    data = {
        "x_label": "digits of the numbers",
        "y_label": "executed to the last digit, share",
        "labels": [str(length) for length in lengths],
        "series": series,
    }
    command = f"deepenough lazy eval {shlex.quote(path)}"
    caption = "On programs that were never trained on."
    return [Shown("bars", "Programs executed rightly", caption, command, data)]


def _exact(rows: list[dict[str, Any]], length: int) -> float:
    """Of all programs of that length, whatever their nesting; 0 where there is none."""
    own = [row for row in rows if row["length"] == length]
    programs = sum(row["programs"] for row in own)
    return float(plain(sum(r["exact"] * r["programs"] for r in own) / programs)) if own else 0.0


def _verdicts(run: Run, path: str, limits: Limits) -> list[str]:
    said = []
    points = epsilon_points(run)
    if len(points) > 1:
        full = points[0]
        alike = [p for p in points if p["bleu"] >= full["bleu"] - 0.2]
        least = min(alike, key=lambda p: p["encoder_flops"])
        share = 100 * least["encoder_flops"] / full["encoder_flops"]
        said.append(
            f"BLEU {full['bleu']:.1f} with all steps; within 0.2 of it at epsilon "
            f"{least['epsilon']:g}, with {share:.0f} % of the encoder's FLOPs."
        )
    record = next((r for r in reversed(run.records) if r.kind == PROGRAMS), None)
    exact = None if record is None else number(record.values.get("exact"))
    if exact is not None:
        said.append(f"{100 * exact:.1f} % of programs never seen are executed to the last digit.")
    look = last_look(run)
    if look is not None:
        moving = float(np.mean([side.similarity[:, -1].mean() for side in look.sides]))
        said.append(
            f"By the last step states hardly move: they agree with those before it to "
            f"{100 * moving:.1f} %."
            if moving > 0.98
            else f"In the last step states still move: they agree with those before it to "
            f"{100 * moving:.1f} %."
        )
    return said
