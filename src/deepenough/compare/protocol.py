"""One protocol for everything that can be measured at several operating points.

Nothing is known of a `Candidate` here but its points, how to run one and how to judge the answers,
so that methods that have little in common are measured alike:

- all answer the same data on the same number of threads;
- a first pass warms up and is judged, one more counts FLOPs with torch's own counter, neither is
  timed;
- then rounds, in each of which every point is timed once, in an order drawn anew: a slow moment of
  the machine hits no point more than another, and no point always follows the same one.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepenough.artifacts import FinishedParts
from deepenough.compare.config import CompareConfig
from deepenough.errors import UserError
from deepenough.measurement import (
    Candidate,
    FrontierPoint,
    Interval,
    OperatingPoint,
    Scores,
    median_interval,
)

#: Hears how many passes are done, and of how many.
Advance = Callable[[int, int], None]


def measure(
    candidates: Sequence[Candidate],
    config: CompareConfig,
    advance: Advance | None = None,
    parts: FinishedParts | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """Measure every operating point of every candidate.

    What a point scored and every round that is timed are `parts`: those that are there already are
    not measured again. Returned are a row of `frontier.json` for every point, and the time that the
    rounds took with no model at work, as a share of the rest.
    """
    pairs = [(candidate, point) for candidate in candidates for point in candidate.points()]
    parts = parts or FinishedParts(None, "compare")
    total = len(pairs) * (1 + config.rounds)
    cold = set(range(len(pairs)))

    def score(place: int) -> dict[str, Any]:
        candidate, point = pairs[place]
        judged = candidate.judge(point, candidate.run(point))
        if not all(map(math.isfinite, judged.quality)):
            raise UserError(
                f"The quality of {candidate.name} at {point.name} is {judged.quality.value}, no "
                "number that can be compared: leave the run out."
            )
        counts = config.count_flops and point.is_counted
        counted = count_flops(candidate, point) if counts else None
        cold.discard(place)
        return {"judged": asdict(judged), "counted": counted}

    def time_round(order: list[int]) -> dict[str, Any]:
        while cold:  # a point that was scored before the command was stopped
            _timed(*pairs[cold.pop()])
        begun = time.perf_counter()
        own = {place: _timed(*pairs[place]) for place in order}
        spent = time.perf_counter() - begun
        return {"seconds": [own[place] for place in range(len(pairs))], "spent": spent}

    prepared = []
    for place in range(len(pairs)):
        part = parts.get(f"point-{place}", partial(score, place))
        quality = Interval(*part["judged"].pop("quality"))
        prepared.append((Scores(quality, **part["judged"]), part["counted"]))
        if advance is not None:
            advance(place + 1, total)
    shuffle = random.Random(config.seed).shuffle
    rounds: list[dict[str, Any]] = []
    for number in range(1, config.rounds + 1):
        order = list(range(len(pairs)))
        shuffle(order)
        if advance is not None:
            advance(number * len(pairs), total)
        rounds.append(parts.get(f"round-{number}", partial(time_round, order)))
    seconds = [list(own) for own in zip(*(each["seconds"] for each in rounds), strict=True)]
    at_work = sum(map(sum, seconds))
    bookkeeping = (sum(each["spent"] for each in rounds) - at_work) / at_work
    rows = []
    for (candidate, point), (judged, counted), own in zip(pairs, prepared, seconds, strict=True):
        # Round by round, in which a slow round cancels.
        ratios = [value / first for value, first in zip(own, seconds[0], strict=True)]
        row = FrontierPoint(
            run=candidate.name,
            mechanism=point.mechanism or candidate.mechanism,
            name=point.name,
            settings=dict(point.settings),
            command=point.command,
            **_ends("quality", judged.quality),
            units=judged.units,
            layers=judged.layers,
            flops=judged.flops / judged.units,
            flops_counted=None if counted is None else counted / judged.units,
            **_ends("milliseconds", median_interval([1e3 * s / judged.units for s in own])),
            **_ends("relative_time", median_interval(ratios)),
            sample=judged.sample,
        )
        rows.append(asdict(row))
    return rows, bookkeeping


def _ends(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def count_flops(candidate: Candidate, point: OperatingPoint) -> float:
    """Return the FLOPs of a pass by torch's counter, which knows attention as matrix products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        candidate.run(point)
    return float(counter.get_total_flops())


def _timed(candidate: Candidate, point: OperatingPoint) -> float:
    """Return the seconds of one pass over all of the data."""
    started = time.perf_counter()
    answers = candidate.run(point)  # kept until the clock has stopped: freeing it takes time too
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    took = time.perf_counter() - started
    del answers
    return took
