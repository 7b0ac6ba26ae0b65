"""`compare`: runs on one task, measured under one protocol, as `frontier.json`.

What a run is, its folder tells: which model it holds, or which maps. Runs of different tasks are
refused before anything is measured, since their qualities lie on no common axis.

`frontier.json` holds every point with quality, layers, FLOPs and milliseconds, each with its
interval where it has one; of each of the three costs it says which points no other beats. Points
that are beaten stay: they are results too.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from deepenough.artifacts import FinishedParts, files_of, write_json
from deepenough.compare.config import CompareConfig
from deepenough.compare.protocol import Advance, measure
from deepenough.config import processor, provenance, resolve, to_dict, validate
from deepenough.errors import UserError
from deepenough.figure import distinct_names, writing
from deepenough.measurement import Candidate
from deepenough.registry import METHODS
from deepenough.report.figures import FRONTIER
from deepenough.runs import RunFolder, read_config

#: Costs, the less the better; each has a chart and a frontier of its own.
COSTS = ("layers", "flops", "milliseconds")


def compare(runs: Sequence[str | os.PathLike[str]], **options: Any) -> dict[str, Any]:
    """Measure finished runs of one task at several operating points, under one protocol.

    Options are those of `deepenough compare`, such as `out`, `rounds`, `data` or `limit`. Returned
    is what `frontier.json` in the folder `out` holds: the task, the protocol, and every point with
    quality, layers, FLOPs and milliseconds.
    """
    overrides = {"runs": [os.fspath(run) for run in runs], **options}
    return run_comparison(resolve(CompareConfig, overrides=overrides))


def run_comparison(
    settings: CompareConfig,
    advance: Advance | None = None,
    opened: Sequence[Candidate] | None = None,
) -> dict[str, Any]:
    """Measure, write `frontier.json`, and return what stands in it.

    The runs may be `opened` already; by default that is done here.
    """
    validate(settings)
    if not settings.runs:
        raise UserError(
            "There is nothing to compare: name the folders of finished runs, as in "
            "deepenough compare runs/first runs/second."
        )
    names = distinct_names(settings.runs)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"Two runs are called {twice}: name every run once.")
    out = Path(settings.out)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folders = dict(zip(names, settings.runs, strict=True))
    candidates = opened or [_open(run, name, settings) for name, run in folders.items()]
    check_one_task(candidates, settings.runs)
    for candidate in candidates:
        candidate.points()  # those that cannot be are refused before anything is written
    places = [place for run in settings.runs for place in _model_places(RunFolder.open(run))]
    tasks = [candidate.task for candidate in candidates]
    about = (replace(settings, out=""), tasks, files_of(*places), torch.get_num_threads())
    with FinishedParts(out, "compare", *about, provenance()) as parts:
        points, bookkeeping = measure(candidates, settings, advance, parts)
        better = candidates[0].task.higher_is_better
        for point in points:
            point["folder"] = folders[point["run"]]
            point["optimal"] = [
                cost for cost in COSTS if not any(_beats(o, point, cost, better) for o in points)
            ]
        content = {
            "command": settings.command(),
            "task": asdict(candidates[0].task),
            "protocol": {
                "rounds": settings.rounds,
                "seed": settings.seed,
                "threads": torch.get_num_threads(),
                "processor": processor(),
            },
            "bookkeeping": bookkeeping,
            "points": points,
            "provenance": provenance()
            | {"date": time.strftime("%Y-%m-%d"), "settings": to_dict(settings)},
        }
        with writing(out):
            write_json(out / FRONTIER, content)
    return content


def _model_places(folder: RunFolder) -> tuple[Path, ...]:
    """Return where a run keeps what is compared: a model, the one it led to, or maps."""
    return folder.model, folder.derived / "model", folder.path / "shortcuts"


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


def _open(run: str, name: str, settings: CompareConfig) -> Candidate:
    """Return a run as a candidate, by the method that its config.yaml names."""
    method = read_config(run).get("method")
    openers = [
        known.load("evaluation", "open_candidate") for known in METHODS if method in known.measures
    ]
    open_candidate = next(filter(None, openers), None)
    if open_candidate is None:
        raise UserError(
            f"{run} is a run of {method or 'no known method'}, which has no operating points "
            "to compare: leave it out."
        )
    folder = RunFolder.open(run)
    if not any(place.is_dir() for place in _model_places(folder)):
        raise UserError(
            f"The run {run} is not finished: it has no model. Resume it with --resume, or leave it "
            "out."
        )
    candidate: Candidate = open_candidate(run, name, settings)
    if settings.mechanisms:
        own = {point.mechanism or candidate.mechanism for point in candidate.points()}
        if not own <= set(settings.mechanisms):  # the candidate has not heeded the choice
            raise UserError(
                f"mechanisms are chosen for runs that generate text, and {run} does not: choose "
                "its points with grid."
            )
    return candidate


def _beats(other: dict[str, Any], row: dict[str, Any], cost: str, higher: bool) -> bool:
    """Return whether `other` is at least as good in both and better in one."""
    sign = 1.0 if higher else -1.0
    gain = sign * (other["quality"] - row["quality"])
    saving = row[cost] - other[cost]
    return gain >= 0 and saving >= 0 and (gain > 0 or saving > 0)
