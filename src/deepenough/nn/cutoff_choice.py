"""The fastest cutoffs on this machine: costs are fitted, solved exactly, and the clock decides.

1. The parts of the layer are timed and fitted (`softmax_cost`).
2. For every number of clusters the best cutoffs under the fitted costs are found exactly
   (`cheapest_cutoffs`); those that minimise `size * mass` stand beside them.
3. Of these few candidates the promising ones are run as real layers, taking turns
   (`softmax_time`), and the fastest is chosen; where one is too large to be run, the fit decides.

So cutoffs are optimal for the fitted costs, and the number of clusters is chosen by measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from deepenough.errors import UserError
from deepenough.nn.cutoffs import cheapest_cutoffs, optimal_cutoffs
from deepenough.nn.softmax_cost import LayerShape, SoftmaxCost, measure_softmax_cost
from deepenough.nn.softmax_time import can_be_timed, time_partitions

Track = Callable[[Sequence[Any], str], Iterable[Any]]

_PROMISING = 2.0
"""Candidates fitted at more than this many times the best one's cost are not worth running."""


@dataclass(frozen=True)
class Candidate:
    """Cutoffs with their fitted and, where they were run, their measured seconds of a step."""

    cutoffs: list[int]
    best_for: str
    fitted: float
    measured: float | None


@dataclass(frozen=True)
class Choice:
    """What was compared, and what won."""

    best: Candidate
    candidates: list[Candidate]
    cost: SoftmaxCost
    solve_seconds: float
    """Time of the exact solver alone."""


def choose_cutoffs(
    masses: npt.NDArray[Any],
    shape: LayerShape,
    max_clusters: int = 5,
    clusters: int | None = None,
    track: Track = lambda items, _: items,
) -> Choice:
    """Measure, solve and choose among 1 to `max_clusters` clusters, or with `clusters` of them.

    `track` may wrap the work, given with a title, to show its progress.
    """
    fewest, most = _numbers_of_clusters(len(masses), shape, max_clusters, clusters)
    cost = measure_softmax_cost(
        len(masses), shape, most, track=lambda points: track(points, "Timing parts of the layer")
    )
    start = time.perf_counter()
    partitions = cheapest_cutoffs(masses, cost.head, cost.tails)[fewest - 1 :]
    solve_seconds = time.perf_counter() - start
    proposals = {tuple(partition.cutoffs): "measured cost" for partition in partitions}
    for number in range(fewest, most + 1):
        proposals.setdefault(tuple(optimal_cutoffs(masses, number).cutoffs), "size x mass")
    fitted = {cutoffs: cost.seconds(masses, cutoffs) for cutoffs in proposals}
    promising = [c for c in proposals if fitted[c] <= _PROMISING * min(fitted.values())]
    measured: dict[tuple[int, ...], float] = {}
    # One that cannot be run cannot be judged by the clock, nor may it lose for that.
    if all(can_be_timed(masses, cutoffs, shape) for cutoffs in promising):
        times = time_partitions(
            masses, promising, shape, track=lambda turns: track(turns, "Timing whole layers")
        )
        measured = dict(zip(promising, times, strict=True))
    candidates = [
        Candidate(list(cutoffs), best_for, fitted[cutoffs], measured.get(cutoffs))
        for cutoffs, best_for in proposals.items()
    ]
    return Choice(min(candidates, key=_rank), candidates, cost, solve_seconds)


def _numbers_of_clusters(
    vocab_size: int, shape: LayerShape, max_clusters: int, clusters: int | None
) -> tuple[int, int]:
    """The fewest and the most clusters to consider: no more than words or than widths of tails."""
    most = max_clusters if clusters is None else clusters
    if most < 1 or (clusters is not None and clusters > vocab_size):
        raise UserError(
            f"The number of clusters must be from 1 to {vocab_size}, the number of words, "
            f"not {most}."
        )
    possible = 1 + len(shape.tail_widths(most - 1))
    if clusters is not None and possible < clusters:
        raise UserError(
            f"With a width of {shape.d_model} divided by {shape.div_value:g} from tail to tail "
            f"there can be {possible} clusters at most, not {clusters}; ask for fewer or divide by "
            "less."
        )
    return clusters or 1, min(possible, vocab_size)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Those that were run come first, by the clock; where none was, the fit decides."""
    if candidate.measured is None:
        return True, candidate.fitted
    return False, candidate.measured
