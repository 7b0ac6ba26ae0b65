"""Optimal cutoffs of an adaptive softmax: the cheapest way to cut a vocabulary into clusters.

The adaptive softmax (arXiv 1609.04309; torch's `AdaptiveLogSoftmaxWithLoss`) cuts the words,
frequent ones first, into consecutive clusters. A cluster of `size` words and probability `mass`
costs `size * mass`: it has that many outputs and is evaluated that often. With `P` the running sum
of the masses and `0 = c_0 < c_1 < ... < c_K = N`, this file minimises

    sum_k (c_k - c_(k-1)) * (P[c_k] - P[c_(k-1)])                                            (1)

exactly, by dynamic programming over the number of clusters:

    D_k[j] = min_(i<j)  D_(k-1)[i] + w(i, j),      w(i, j) = (j - i) * (P[j] - P[i])         (2)

For a <= b <= c <= d, w(a,d) + w(b,c) - w(a,c) - w(b,d) = (b-a)(P[d]-P[c]) + (d-c)(P[b]-P[a]) >= 0:
the quadrangle inequality, whatever the order of the words. So the best `i` never moves left as `j`
grows, and that of a row lies between those of any row above and any row below it. Rows are solved
at distance N/2, then N/4 and so on, all rows of one distance together in numpy; each such pass
looks at no more than 2N pairs, so one more cluster costs O(N log N). The plain O(K N^2) loop stands
beside it as `optimal_cutoffs_ref`.

The same recurrence solves a measured cost exactly (`cheapest_cutoffs`): time that grows linearly
with words, with mass and with their product only adds terms of `i` and of `j` alone to `w`.

Exactness: with whole counts all sums are 64-bit integers as long as N times the total count is
below 2^63, and the optimum is exact. Larger counts and fractions are summed in float64; then the
cost found exceeds the optimum by rounding at most: K * log2(N) * 1e-15 of N, the cost of a single
cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepenough.errors import UserError

Numbers = npt.NDArray[Any]
Positions = npt.NDArray[np.signedinteger[Any]]

_PAIRS_AT_ONCE = 1 << 16
"""Pairs (i, j) evaluated together: the temporary arrays of so many stay in the cache."""


@dataclass(frozen=True)
class Partition:
    """A way to cut the vocabulary: `cutoffs` as torch takes them, without the vocabulary size."""

    cutoffs: list[int]
    cost: float

    @property
    def num_clusters(self) -> int:
        return len(self.cutoffs) + 1


@dataclass(frozen=True)
class ClusterCost:
    """Cost of a cluster: `fixed + per_word*size + per_mass*mass + per_product*size*mass`."""

    fixed: float
    per_word: float
    per_mass: float
    per_product: float

    def __call__(self, size: float, mass: float) -> float:
        linear = self.fixed + self.per_word * size + self.per_mass * mass
        return linear + self.per_product * size * mass


def optimal_cutoffs(masses: npt.ArrayLike, clusters: int) -> Partition:
    """The exact minimum of (1) over all cuts of the words, as they are given, into intervals.

    `masses` are counts or probabilities. In descending order the result is also the best of all
    partitions of the words, intervals or not. Among equal optima the last cutoff is the smallest
    possible, then the one before it, and so on. The cost is that of masses scaled to sum to 1.
    """
    checked = _check(masses, clusters)
    prefix = _prefix_sums(checked)
    end = len(checked)
    value = np.arange(end + 1) * prefix  # D_1
    best_cuts: list[Positions] = []
    for k in range(2, clusters):
        reach = _reach(checked, k, clusters)
        value, cuts = _add_cluster(value, prefix[: reach + 1], k)
        best_cuts.append(
            cuts.astype(np.int32)
        )  # what memory is made of when there are many clusters
    if clusters > 1:  # of the last cluster only its row N is wanted
        last = np.zeros(end + 1, dtype=np.int64)
        last[end], _ = _solve_row(value, prefix, clusters, end)
        best_cuts.append(last)
    cutoffs = _trace_back(best_cuts, end)
    return Partition(cutoffs, partition_cost(checked, cutoffs))


def cheapest_cutoffs(
    masses: npt.ArrayLike, head: ClusterCost, tails: Sequence[ClusterCost]
) -> list[Partition]:
    """The cheapest partition for 1, 2, ... `len(tails) + 1` clusters at the given costs.

    Every token runs through the head, which holds the first cluster's words and one more output for
    each tail. `tails[t]` is the cost of the t-th tail. Mass is that of masses scaled to sum to 1.
    Exact for these costs up to float64 rounding: none of them is negative, so the quadrangle
    inequality holds.
    """
    checked = _check(masses, 1)
    if min(min(vars(cost).values()) for cost in (head, *tails)) < 0:
        raise UserError("The costs of clusters must not be negative; measure them again.")
    prefix = _prefix_sums(checked.astype(np.float64))
    prefix /= _total(prefix[-1])
    end = len(checked)
    words = np.arange(end + 1, dtype=np.float64)
    per_head_word = head.per_word + head.per_product
    value = head.fixed + head.per_mass + per_head_word * words
    best_cuts: list[Positions] = []
    partitions = [Partition([], float(value[end]))]
    for k, tail in enumerate(tails[: end - 1], start=2):
        # w = per_product*(j-i)*(P[j]-P[i]) + separable[j] - separable[i] + fixed
        separable = tail.per_word * words + tail.per_mass * prefix
        value, cuts = _add_cluster(value - separable, tail.per_product * prefix, k)
        value += separable + tail.fixed
        best_cuts.append(cuts)
        cost = float(value[end]) + per_head_word * (k - 1)
        partitions.append(Partition(_trace_back(best_cuts, end), cost))
    return partitions


def partition_cost(masses: npt.ArrayLike, cutoffs: Sequence[int]) -> float:
    """The cost (1) of given cutoffs, masses scaled to sum to 1."""
    values = np.asarray(masses)
    bounds = [0, *cutoffs, len(values)]
    # Python's integers do not overflow, and fsum rounds once.
    parts = [values[i:j].tolist() for i, j in itertools.pairwise(bounds)]
    if values.dtype.kind in "iub":
        total = sum(map(sum, parts))
        return sum(len(part) * sum(part) for part in parts) / _total(total)
    sums = [math.fsum(part) for part in parts]
    return math.fsum(len(p) * s for p, s in zip(parts, sums, strict=True)) / _total(math.fsum(sums))


def optimal_cutoffs_ref(masses: npt.ArrayLike, clusters: int) -> Partition:
    """What `optimal_cutoffs` gives, by the O(K N^2) double loop over Python numbers."""
    checked = _check(masses, clusters)
    end = len(checked)
    prefix = [0]
    for mass in checked.tolist():
        prefix.append(prefix[-1] + mass)
    value = [j * prefix[j] for j in range(end + 1)]
    best_cuts = []
    for k in range(2, clusters + 1):
        previous, value = value, [0] * (end + 1)
        cuts = np.zeros(end + 1, dtype=np.int64)
        for j in range(k, end + 1):
            value[j], cuts[j] = min(
                (previous[i] + (j - i) * (prefix[j] - prefix[i]), i) for i in range(k - 1, j)
            )
        best_cuts.append(cuts)
    cutoffs = _trace_back(best_cuts, end)
    return Partition(cutoffs, partition_cost(checked, cutoffs))


def _check(masses: npt.ArrayLike, clusters: int) -> Numbers:
    values = np.asarray(masses)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iubf":
        raise UserError("Word counts must be a non-empty list of numbers; check the input.")
    if not np.isfinite(values).all() or (values < 0).any():
        raise UserError("Word counts must be finite and not negative; check the input.")
    if not 1 <= clusters <= len(values):
        raise UserError(
            f"The number of clusters must be from 1 to {len(values)}, the number of words, "
            f"not {clusters}."
        )
    return values


def _prefix_sums(values: Numbers) -> Numbers:
    """`P`, of N + 1 entries: int64 where every sum and product of (2) fits, else float64."""
    exact = values.dtype.kind in "iub" and (
        # The float sum decides first whether the integer sum can be trusted not to wrap around.
        float(values.sum(dtype=np.float64)) < 2.0**62
        and int(values.sum(dtype=np.int64)) * len(values) < 2**63
    )
    # Where the machine has a longer float, it keeps the sums correct to about the last bit.
    sums = np.cumsum(values, dtype=np.int64 if exact else np.longdouble)
    return np.concatenate(([0], sums)).astype(np.int64 if exact else np.float64)


def _reach(values: Numbers, k: int, clusters: int) -> int:
    """How far the first `k` of `clusters` clusters can extend at the smallest best cuts.

    For a given set of sizes it is best to give descending masses ascending sizes (rearrangement
    inequality). Were the last cluster smaller than the average, another order of the sizes would
    be as good with an earlier last cut. So the first k clusters hold no more than k/K of the words.
    """
    descending = bool((values[:-1] >= values[1:]).all())
    return len(values) * k // clusters if descending else len(values)


def _add_cluster(previous: Numbers, prefix: Numbers, k: int) -> tuple[Numbers, Positions]:
    """One step of (2): from D_(k-1) to D_k[j] and its smallest best `i`, k <= j < len(prefix).

    `previous` may be shorter, where no best `i` lies further right.
    """
    end = len(prefix) - 1
    value = np.zeros(end + 1, dtype=previous.dtype)
    cuts = np.zeros(end + 1, dtype=np.int64)
    cuts[k - 1] = k - 1  # stands for the row above the first one: no cut lies further left
    cuts[end], value[end] = _solve_row(previous, prefix, k, end)
    distance = 1 << max(end - k, 0).bit_length()
    while distance:
        # Rows at k-1 + odd multiples of `distance`; their neighbours at even multiples are solved.
        rows = np.arange(k - 1 + distance, end, 2 * distance)
        low = cuts[rows - distance]
        high = np.minimum(cuts[np.minimum(rows + distance, end)], rows - 1)
        _solve_rows(previous, prefix, rows, low, high, value, cuts)
        distance //= 2
    return value, cuts


def _solve_row(previous: Numbers, prefix: Numbers, k: int, j: int) -> tuple[int, Any]:
    """The smallest best `i` of one row among all k-1 <= i < j, and its value."""
    i = np.arange(k - 1, min(j, len(previous)))
    costs = previous[i] + (j - i) * (prefix[j] - prefix[i])
    best = int(np.argmin(costs))
    return k - 1 + best, costs[best]


def _solve_rows(
    previous: Numbers,
    prefix: Numbers,
    rows: Positions,
    low: Positions,
    high: Positions,
    value: Numbers,
    cuts: Positions,
) -> None:
    """Write value and smallest best `i` in low..high of every row: a ragged argmin."""
    # Where the bounds meet there is nothing to search: most rows of the last, longest passes.
    settled = low == high
    j, i = rows[settled], low[settled]
    value[j] = previous[i] + (j - i) * (prefix[j] - prefix[i])
    cuts[j] = i
    rows, low, high = rows[~settled], low[~settled], high[~settled]
    lengths = high - low + 1
    stops = np.cumsum(lengths)
    done = 0
    while done < len(rows):
        before = int(stops[done] - lengths[done])
        upto = max(done + 1, int(np.searchsorted(stops, before + _PAIRS_AT_ONCE, side="right")))
        j, length = rows[done:upto], lengths[done:upto]
        starts = stops[done:upto] - length - before
        # All pairs of these rows in one flat array: row after row, `i` ascending.
        i = np.arange(int(stops[upto - 1]) - before)
        i += np.repeat(low[done:upto] - starts, length)
        costs = np.repeat(prefix[j], length) - prefix[i]
        costs *= np.repeat(j, length) - i
        costs += previous[i]
        minima = np.minimum.reduceat(costs, starts)
        hits = np.flatnonzero(costs == np.repeat(minima, length))
        value[j] = minima
        cuts[j] = i[hits[np.searchsorted(hits, starts)]]  # the first hit of each row
        done = upto


def _trace_back(best_cuts: Sequence[Positions], end: int) -> list[int]:
    """The cutoffs, ascending, that lead to D_K[N]."""
    cutoffs: list[int] = []
    for cuts in reversed(best_cuts):
        end = int(cuts[end])
        cutoffs.append(end)
    return cutoffs[::-1]


def _total(total: Any) -> Any:
    """What masses are divided by; words that never occur cost nothing."""
    return total if total > 0 else 1
