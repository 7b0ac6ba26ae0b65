"""One protocol for everything that can be measured at several operating points.

A `Candidate` is a finished run. It knows its task, its operating points, how to answer the whole
data at one of them, and how to judge the answers. Nothing else is known of it here, so that methods
that have little in common are measured alike:

- all answer the same data on the same number of threads;
- the first passes warm up, one more counts FLOPs with torch's own counter, none of them is timed;
- then rounds, in each of which every point is timed once, in an order drawn anew: a slow moment of
  the machine hits no point more than another, and no point always follows the same one;
- answers are judged once, outside of the clock.

Whatever the loop itself needs is measured too: `Clock.bookkeeping`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepenough.compare.config import CompareConfig
from deepenough.measurement import (
    Candidate,
    Interval,
    OperatingPoint,
    Scores,
    median_interval,
)

#: Hears how many passes are done, and of how many.
Advance = Callable[[int, int], None]


@dataclass
class Clock:
    """Where the time of a comparison went, in seconds."""

    measured: float = 0.0
    """In the rounds, with a candidate at work."""
    bookkeeping: float = 0.0
    """In the rounds, with none at work."""
    preparing: float = 0.0
    """Counting FLOPs, warming up, judging."""

    @property
    def share(self) -> float:
        """Return the time spent on bookkeeping as a share of the time measured."""
        return self.bookkeeping / self.measured if self.measured else 0.0


@dataclass(frozen=True)
class Measured:
    """One point of the chart."""

    candidate: Candidate
    point: OperatingPoint
    judged: Scores
    counted: float | None
    """FLOPs of all units by torch's counter, padding included."""
    seconds: tuple[float, ...]
    """Of every round, over all of the data."""
    milliseconds: Interval
    """Of a unit."""
    relative_time: Interval
    """To the first point of all, round by round, in which a slow round cancels."""


def measure(
    candidates: Sequence[Candidate],
    config: CompareConfig,
    advance: Advance | None = None,
) -> tuple[list[Measured], Clock]:
    """Measure every operating point of every candidate; times are relative to the first one."""
    pairs = [(candidate, point) for candidate in candidates for point in candidate.points()]
    total = len(pairs) * (1 + config.rounds)
    clock = Clock()
    started = time.perf_counter()
    prepared = []
    for done, (candidate, point) in enumerate(pairs, start=1):
        prepared.append(_prepare(candidate, point, config))
        if advance is not None:
            advance(done, total)
    clock.preparing = time.perf_counter() - started
    seconds = _rounds(pairs, config, clock, advance)
    found = []
    for (candidate, point), (judged, counted), own in zip(pairs, prepared, seconds, strict=True):
        each = [1000 * value / judged.units for value in own]
        ratios = [value / first for value, first in zip(own, seconds[0], strict=True)]
        found.append(
            Measured(
                candidate,
                point,
                judged,
                counted,
                tuple(own),
                median_interval(each),
                median_interval(ratios),
            )
        )
    return found, clock


def _prepare(
    candidate: Candidate, point: OperatingPoint, config: CompareConfig
) -> tuple[Scores, float | None]:
    """Warm up, judge and count; a first pass may do more than all others, so it is not counted."""
    for _ in range(config.warmup - 1):
        candidate.run(point)
    judged = candidate.judge(point, candidate.run(point))
    return judged, count_flops(candidate, point) if config.count_flops else None


def count_flops(candidate: Candidate, point: OperatingPoint) -> float:
    """Return the FLOPs of a pass by torch's counter, which knows attention as matrix products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        candidate.run(point)
    return float(counter.get_total_flops())


def _rounds(
    pairs: Sequence[tuple[Candidate, OperatingPoint]],
    config: CompareConfig,
    clock: Clock,
    advance: Advance | None,
) -> list[list[float]]:
    """Return seconds of every point in every round."""
    seconds: list[list[float]] = [[] for _ in pairs]
    shuffle = random.Random(config.seed).shuffle
    begun = time.perf_counter()
    for number in range(1, config.rounds + 1):
        order = list(range(len(pairs)))
        shuffle(order)
        if advance is not None:
            advance(number * len(pairs), len(pairs) * (1 + config.rounds))
        for place in order:
            candidate, point = pairs[place]
            started = time.perf_counter()
            answers = candidate.run(point)
            _wait(answers)
            took = time.perf_counter() - started
            seconds[place].append(took)
            clock.measured += took
            del answers  # else the next one would be timed beside its memory
    clock.bookkeeping = time.perf_counter() - begun - clock.measured
    return seconds


def _wait(_: Any) -> None:
    """Let the device finish what it was asked for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
