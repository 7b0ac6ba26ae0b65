"""A comparison in a report: the frontier, and what it says in plain words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from deepenough.report.frontier_file import COSTS, Frontier
from deepenough.report.lens_words import readable
from deepenough.report.page_parts import Limits, Part, Shown, plain
from deepenough.report.source import number


def frontier_part(frontier: Frontier, limits: Limits) -> Part:
    """The chart of all points, texts as they were written, and the choice one would make."""
    unit = frontier.unit
    data = {
        "y_label": frontier.quality,
        "costs": [
            {"key": key, "label": label.format(unit=unit)} for key, (label, _) in COSTS.items()
        ],
        "points": [_point(row, frontier) for row in frontier.points],
    }
    rounds = frontier.content.get("protocol", {})
    caption = (
        "Filled: no other point is at least as good and cheaper. Hollow: one is. Lines: intervals "
        f"of {100 * (number(rounds.get('confidence')) or 0.95):g} %. Every point was timed "
        f"{rounds.get('rounds', '?')} times, in turns. Choose a point to see what runs it."
    )
    part = Part("Frontier", about=_about(frontier))
    title = f"{frontier.quality} against cost"
    part.figures.append(Shown("frontier", title, caption, _command(frontier), data, wide=True))
    part.figures += _texts(frontier, limits)
    for text in part.figures[1:]:
        if text.data["of"] > len(text.data["tokens"]):
            told = f"{len(text.data['tokens'])} of {text.data['of']} tokens in “{text.title}”"
            part.thinned.append(told)
    part.summary += _choice(frontier)
    return part


def _about(frontier: Frontier) -> str:
    """What was measured, and where."""
    said = f"{frontier.title[:1].upper()}{frontier.title[1:]}"
    protocol = frontier.content.get("protocol", {})
    if protocol.get("processor"):
        threads = protocol.get("threads", "?")
        said += f", measured on {protocol['processor']} with {threads} thread(s)"
    share = number(frontier.content.get("bookkeeping"))
    if share is not None:
        said += f"; measuring itself took {100 * share:.2g} % of the time"
    return f"{said}."


def _point(row: Mapping[str, Any], frontier: Frontier) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for key, (_, scale) in COSTS.items():
        costs[key] = {"value": plain(row[key] / scale)}
        low, high = number(row.get(f"{key}_low")), number(row.get(f"{key}_high"))
        if low is not None and high is not None:
            costs[key] |= {"low": plain(low / scale), "high": plain(high / scale)}
    optimal = row.get("optimal")
    return {
        "name": frontier.name_of(row),
        "group": str(row.get("mechanism", "")),
        "folder": str(row.get("folder") or row.get("run", "")),
        "command": str(row.get("command") or ""),
        "quality": plain(row["quality"]),
        "low": plain(row["quality_low"]),
        "high": plain(row["quality_high"]),
        "costs": costs,
        "optimal": [str(name) for name in optimal] if isinstance(optimal, list) else [],
    }


def _choice(frontier: Frontier) -> list[str]:
    """The quickest point that is as good as the best within the intervals, beside the best."""
    sign = 1.0 if frontier.higher_is_better else -1.0
    best = max(frontier.points, key=lambda row: (sign * row["quality"], -row["milliseconds"]))
    alike = [
        row
        for row in frontier.points
        if row["quality_low"] <= best["quality_high"] and best["quality_low"] <= row["quality_high"]
    ]
    quick = min(alike, key=lambda row: row["milliseconds"])
    name = f"“{frontier.name_of(best)}”"
    said = f"Best {frontier.quality}: {best['quality']:.4g}, by {name}"
    first = frontier.points[0]
    if best is not first:
        said += f", {first['milliseconds'] / best['milliseconds']:.2f} times as fast as "
        said += f"“{frontier.name_of(first)}”"
    if quick is best:
        return [f"{said}; nothing that the intervals do not tell from it is quicker."]
    times = best["milliseconds"] / quick["milliseconds"]
    return [
        f"{said}. The intervals do not tell it from “{frontier.name_of(quick)}”, which is "
        f"{times:.2f} times as fast: {frontier.quality} {quick['quality']:.4g}, "
        f"{quick['layers']:.1f} blocks per {frontier.unit} instead of {best['layers']:.1f}."
    ]


def _command(frontier: Frontier) -> str:
    command = frontier.content.get("command")
    if isinstance(command, str) and command:
        return command
    settings = frontier.content.get("provenance", {}).get("settings", {})
    runs = settings.get("runs") if isinstance(settings, dict) else None
    if isinstance(runs, list) and runs:
        words = [*map(str, runs), "--out", str(settings.get("out", ""))]
        return "deepenough compare " + shlex.join(words)
    return "deepenough compare --config comparison.yaml"


def _texts(frontier: Frontier, limits: Limits) -> list[Shown]:
    """Generated texts, every token shaded by the layer it left at."""
    found = []
    for row in frontier.points:
        sample = row.get("sample")
        if not isinstance(sample, dict):
            continue
        tokens, depth, last = sample.get("tokens"), sample.get("depth"), sample.get("layers")
        if not isinstance(tokens, list) or not isinstance(depth, list) or not isinstance(last, int):
            continue
        if len(tokens) != len(depth) or not tokens or last < 1:
            continue
        data = {
            "tokens": [readable(str(token)) for token in tokens[: limits.tokens]],
            "depth": [None if number(d) is None else d for d in depth[: limits.tokens]],
            "last": last,
            "of": len(tokens),
            "depth_name": "layers run",
        }
        caption = "What was written; the prompt is not shaded. Bright: all layers ran."
        title = f"How deep “{frontier.name_of(row)}” went, token by token"
        found.append(Shown("tokens", title, caption, _command(frontier), data, wide=True))
    return found
