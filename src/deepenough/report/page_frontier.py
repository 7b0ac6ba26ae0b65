"""A comparison in a report: the frontier, and what it says in plain words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from deepenough.report.frontier_file import COSTS, Frontier
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
        "points": [_point(row) for row in frontier.points],
    }
    rounds = frontier.content.get("protocol", {})
    caption = (
        "Filled: no other point is at least as good and cheaper. Hollow: one is. Lines: intervals "
        f"of {100 * (number(rounds.get('confidence')) or 0.95):g} %. Every point was timed "
        f"{rounds.get('rounds', '?')} times, in turns, on {rounds.get('threads', '?')} thread(s)."
    )
    part = Part(about=f"{frontier.title[:1].upper()}{frontier.title[1:]}.")
    title = f"{frontier.quality} against cost"
    part.figures.append(Shown("frontier", title, caption, _command(frontier), data, wide=True))
    part.figures += _texts(frontier, limits)
    part.summary += _choice(frontier)
    return part


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for key, (_, scale) in COSTS.items():
        costs[key] = {"value": plain(row[key] / scale)}
        low, high = number(row.get(f"{key}_low")), number(row.get(f"{key}_high"))
        if low is not None and high is not None:
            costs[key] |= {"low": plain(low / scale), "high": plain(high / scale)}
    optimal = row.get("optimal")
    return {
        "name": f"{row.get('run', '')} {row.get('name', '')}".strip(),
        "group": str(row.get("mechanism", "")),
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
    name = f"“{_name(best)}”"
    said = f"Best {frontier.quality}: {best['quality']:.4g}, by {name}"
    first = frontier.points[0]
    if best is not first:
        said += f", {first['milliseconds'] / best['milliseconds']:.2f} times as fast as "
        said += f"“{_name(first)}”"
    if quick is best:
        return [f"{said}; nothing as good within the intervals is quicker."]
    times = best["milliseconds"] / quick["milliseconds"]
    return [
        f"{said}. As good within the intervals, and {times:.2f} times as fast: “{_name(quick)}”, "
        f"{frontier.quality} {quick['quality']:.4g}, {quick['layers']:.1f} blocks per "
        f"{frontier.unit} instead of {best['layers']:.1f}."
    ]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row.get('run', '')} {row.get('name', '')}".strip()


def _command(frontier: Frontier) -> str:
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
            "tokens": [str(token) for token in tokens[: limits.tokens]],
            "depth": [None if number(d) is None else d for d in depth[: limits.tokens]],
            "last": last,
            "depth_name": "layers run",
        }
        caption = "What was written; the prompt is not shaded. Bright: all layers ran."
        title = f"How deep “{_name(row)}” went, token by token"
        found.append(Shown("tokens", title, caption, _command(frontier), data, wide=True))
    return found
