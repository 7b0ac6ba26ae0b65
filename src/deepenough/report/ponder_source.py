"""What a run has recorded of pondering, checked: exits, tables of passes, single examples, parity.

A run may have been measured several times; of every model the last evaluation counts. Records that
lack something are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepenough.report.source import Run, number
from deepenough.runs import Record

EXIT, PASSES, EXAMPLE, PARITY = "ponder_exit", "ponder_passes", "ponder_example", "parity"


@dataclass(frozen=True)
class ExitPoint:
    """One way of stopping: a policy with its setting."""

    model: str
    policy: str
    setting: float
    passes: float
    accuracy: float


@dataclass(frozen=True)
class PassTable:
    """How many examples of each group made 1, 2, ... passes."""

    model: str
    by: str
    groups: tuple[str, ...]
    counts: np.ndarray
    """[groups, N]"""


@dataclass(frozen=True)
class HaltingExample:
    """One example pass by pass."""

    text: str
    label: str
    passes: int
    halting: np.ndarray
    """[N], probability of halting at each pass."""
    answers: tuple[str, ...]
    confidence: np.ndarray
    """[N], probability of the answer at each pass."""


@dataclass(frozen=True)
class ParityBand:
    """Parity inputs of like difficulty."""

    lowest: int
    highest: int
    beyond: bool
    accuracy: float
    passes: float
    mechanism: str


def exit_points(run: Run) -> list[ExitPoint]:
    found = []
    for record in _latest(run, EXIT):
        values = record.values
        read = [number(values.get(name)) for name in ("setting", "passes", "accuracy")]
        if None not in read and isinstance(values.get("policy"), str):
            found.append(ExitPoint(_model(record), values["policy"], *read))  # type: ignore[arg-type]
    return found


def pass_tables(run: Run) -> list[PassTable]:
    found = []
    for record in _latest(run, PASSES):
        groups, counts = _words(record.values.get("groups")), _array(record.values.get("counts"), 2)
        if counts is None or groups is None or len(groups) != len(counts):
            continue
        by = str(record.values.get("by", ""))
        found.append(PassTable(_model(record), by, groups, counts))
    return found


def halting_examples(run: Run) -> list[HaltingExample]:
    found = []
    for record in _latest(run, EXAMPLE):
        values = record.values
        halting, sure = _array(values.get("halting"), 1), _array(values.get("confidence"), 1)
        answers, passes = _words(values.get("answers")), number(values.get("passes"))
        if halting is None or sure is None or passes is None or answers is None:
            continue
        if not len(halting) == len(sure) == len(answers):
            continue
        text, label = str(values.get("text", "")), str(values.get("label", ""))
        found.append(HaltingExample(text, label, int(passes), halting, answers, sure))
    return found


def parity_bands(run: Run) -> list[ParityBand]:
    found = []
    for record in run.records:
        if record.kind != PARITY:
            continue
        values = record.values
        names = ("lowest", "highest", "accuracy", "passes")
        read = [number(values.get(name)) for name in names]
        if any(value is None for value in read):
            continue
        lowest, highest, accuracy, passes = (float(value or 0.0) for value in read)
        found.append(
            ParityBand(
                int(lowest),
                int(highest),
                values.get("beyond") is True,
                accuracy,
                passes,
                str(values.get("mechanism", run.name)),
            )
        )
    return sorted(found, key=lambda band: band.lowest)


def _latest(run: Run, kind: str) -> Iterator[Record]:
    """The records of a kind from the last evaluation of every model."""
    own = [record for record in run.records if record.kind == kind]
    last: dict[str, float] = {}
    for record in own:
        order = number(record.values.get("evaluation")) or 0.0
        last[_model(record)] = max(order, last.get(_model(record), 0.0))
    for record in own:
        if (number(record.values.get("evaluation")) or 0.0) == last[_model(record)]:
            yield record


def _model(record: Record) -> str:
    return str(record.values.get("model", ""))


def _words(value: Any) -> tuple[str, ...] | None:
    """A list of texts, or None."""
    good = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return tuple(value) if good else None


def _array(value: Any, ndim: int) -> np.ndarray | None:
    """Finite numbers, none negative, with so many axes; or None."""
    try:
        array = np.array(value, dtype=float)
    except (TypeError, ValueError):
        return None
    good = array.ndim == ndim and array.size and np.isfinite(array).all() and (array >= 0).all()
    return array if good else None
