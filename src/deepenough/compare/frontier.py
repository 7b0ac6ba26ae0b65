"""`compare`: runs on one task, measured under one protocol, as `frontier.json`.

What a run is, its folder tells: which model it holds, or which maps. Runs of different tasks are
refused before anything is measured, since their qualities lie on no common axis.

`frontier.json` holds every point with quality, layers, FLOPs and milliseconds, each with its
interval where it has one; of each of the three costs it says which points no other beats. Points
that are beaten stay: they are results too.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepenough.artifacts import write_json
from deepenough.compare.config import CompareConfig
from deepenough.compare.protocol import Advance, Measured, measure
from deepenough.config import provenance, resolve, to_dict, validate
from deepenough.errors import UserError
from deepenough.measurement import CONFIDENCE, Candidate, ComparedRun, coverage
from deepenough.registry import METHODS
from deepenough.runs import RunFolder, read_config, read_records

FRONTIER = "frontier.json"
FORMAT = 1
#: Costs, the less the better; each has a chart and a frontier of its own.
COSTS = ("layers", "flops", "milliseconds")


def compare(runs: Sequence[str | os.PathLike[str]], **options: Any) -> dict[str, Any]:
    """Measure finished runs of one task at several operating points, under one protocol.

    Args:
        runs: Their folders.
        options: Those of `deepenough compare`, such as `out`, `rounds`, `data` or `limit`.

    Returns:
        What `frontier.json` in the folder `out` holds: the task, the protocol, and every point
        with quality, layers, FLOPs and milliseconds.
    """
    overrides = {"runs": [os.fspath(run) for run in runs], **options}
    return run_comparison(resolve(CompareConfig, overrides=overrides))


def run_comparison(settings: CompareConfig, advance: Advance | None = None) -> dict[str, Any]:
    """Measure, write `frontier.json`, and return what stands in it."""
    validate(settings)
    entries = settings.all_entries()
    out = _folder(settings.out)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    started = time.perf_counter()
    names = _names(entries)
    notes = [note for entry in entries for note in _notes(entry.run)]
    candidates = [_open(entry, name, settings) for entry, name in zip(entries, names, strict=True)]
    check_one_task(candidates, [entry.run for entry in entries])
    loading = time.perf_counter() - started
    found, clock = measure(candidates, settings, advance)
    content = {
        "format": FORMAT,
        "command": settings.command(),
        "task": asdict(candidates[0].task),
        "protocol": _protocol(settings),
        "seconds": {"loading": loading, **asdict(clock)},
        "bookkeeping": clock.share,
        "notes": notes,
        "points": _points(found, {n: e.run for n, e in zip(names, entries, strict=True)}),
        "provenance": provenance() | {"settings": to_dict(settings)},
    }
    try:
        write_json(out / FRONTIER, content)
    except OSError as error:
        raise UserError(f"{out / FRONTIER} cannot be written: {error.strerror}.") from error
    return content


def check_one_task(candidates: Sequence[Candidate], runs: Sequence[str]) -> None:
    """Refuse runs that are not about the same thing, naming the first two."""
    first = candidates[0].task
    for candidate, run in zip(candidates[1:], runs[1:], strict=True):
        task = candidate.task
        if str(task) != str(first):
            raise UserError(
                f"{runs[0]} is about {first} but {run} about {task}: compare runs of one task, or "
                "name data that they all answer with --data and --split."
            )
        differing = [
            name for name in first.detail if task.detail.get(name) != first.detail.get(name)
        ]
        if differing:
            raise UserError(
                f"{runs[0]} and {run} are both about {first}, but differ in {differing[0]}: their "
                "figures do not compare."
            )


def _open(entry: ComparedRun, name: str, config: CompareConfig) -> Candidate:
    """Return a run as a candidate, by the method that its config.yaml names."""
    method = read_config(entry.run).get("method")
    openers = [
        known.load("evaluation", "open_candidate") for known in METHODS if method in known.measures
    ]
    open_candidate = next(filter(None, openers), None)
    if open_candidate is None:
        raise UserError(
            f"{entry.run} is a run of {method or 'no known method'}, which has no operating points "
            "to compare: leave it out."
        )
    folder = RunFolder.open(entry.run)
    places = (folder.model, folder.derived / "model", folder.path / "shortcuts")
    if not any(place.is_dir() for place in places):
        raise UserError(
            f"The run {entry.run} is not finished: it has no model{_progress(folder)}. Resume it "
            "with --resume, or leave it out."
        )
    candidate: Candidate = open_candidate(entry, name, config)
    if entry.mechanisms:
        own = {point.mechanism or candidate.mechanism for point in candidate.points()}
        if not own <= set(entry.mechanisms):  # the candidate has not heeded the choice
            raise UserError(
                f"mechanisms are chosen for runs that generate text, and {entry.run} does not: "
                "choose its points with grid."
            )
    return candidate


def _progress(folder: RunFolder) -> str:
    if not folder.metrics.is_file():
        return " and no record"
    records, _ = read_records(folder.metrics)
    return f" and its last record is of step {records[-1].step}" if records else " and no record"


def _notes(run: str) -> list[str]:
    """Return a note for each defect of a run's files that the comparison can bear."""
    metrics = RunFolder.open(run).metrics
    corrupted = read_records(metrics)[1] if metrics.is_file() else 0
    return [f"{corrupted} unreadable line(s) of {metrics} skipped."] if corrupted else []


def _names(entries: Sequence[ComparedRun]) -> list[str]:
    """Return a name for each run: its own, or as much of its path as tells it from the others."""
    parts = [Path(entry.run).resolve().parts for entry in entries]
    names: list[str] = []
    for depth in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(own[-depth:]) for own in parts]
        names = [entry.name or end for entry, end in zip(entries, ends, strict=True)]
        if len(set(names)) == len(names):
            return names
    twice = next(name for place, name in enumerate(names) if name in names[:place])
    raise UserError(f"Two runs are called {twice}: name every run once.")


def _folder(path: str) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {path} cannot be made: {error.strerror}.") from error
    return Path(path)


def _protocol(settings: CompareConfig) -> dict[str, Any]:
    return {
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "seed": settings.seed,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "confidence": CONFIDENCE,
        "coverage_of_times": coverage(settings.rounds),
    }


def _points(found: Sequence[Measured], folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of the file; `folders` tells where each run stands."""
    rows = []
    for each in found:
        judged, time_ = each.judged, each.milliseconds
        rows.append(
            {
                "run": each.candidate.name,
                "folder": folders[each.candidate.name],
                "mechanism": each.point.mechanism or each.candidate.mechanism,
                "name": each.point.name,
                "settings": dict(each.point.settings),
                "command": each.point.command,
                "quality": judged.quality.value,
                "quality_low": judged.quality.low,
                "quality_high": judged.quality.high,
                "units": judged.units,
                "layers": judged.layers,
                "flops": judged.flops / judged.units,
                "flops_counted": None if each.counted is None else each.counted / judged.units,
                "milliseconds": time_.value,
                "milliseconds_low": time_.low,
                "milliseconds_high": time_.high,
                "relative_time": each.relative_time.value,
                "relative_time_low": each.relative_time.low,
                "relative_time_high": each.relative_time.high,
                "round_seconds": list(each.seconds),
                "sample": None if judged.sample is None else dict(judged.sample),
            }
        )
    better = found[0].candidate.task.higher_is_better
    for row in rows:
        row["optimal"] = [
            cost for cost in COSTS if not any(_beats(o, row, cost, better) for o in rows)
        ]
    return rows


def _beats(other: dict[str, Any], row: dict[str, Any], cost: str, higher: bool) -> bool:
    """Return whether `other` is at least as good in both and better in one."""
    sign = 1.0 if higher else -1.0
    gain = sign * (other["quality"] - row["quality"])
    saving = row[cost] - other[cost]
    return gain >= 0 and saving >= 0 and (gain > 0 or saving > 0)
