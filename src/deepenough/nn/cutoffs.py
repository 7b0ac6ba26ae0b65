"""Optimal cutoffs of an adaptive softmax: the cheapest way to cut a vocabulary into clusters.

The adaptive softmax (arXiv 1609.04309; torch's `AdaptiveLogSoftmaxWithLoss`) cuts the tokens,
frequent ones first, into consecutive clusters. A cluster of `size` tokens and probability `mass`
costs `size * mass`: it has that many outputs and is evaluated that often. With `P` the running sum
of the masses and `0 = c_0 < c_1 < ... < c_K = N`, this file minimises

    sum_k (c_k - c_(k-1)) * (P[c_k] - P[c_(k-1)])                                            (1)

exactly, by dynamic programming over the number of clusters:

    D_k[j] = min_(i<j)  D_(k-1)[i] + w(i, j),      w(i, j) = (j - i) * (P[j] - P[i])         (2)

`w` satisfies the quadrangle inequality, so the best `i` never moves left as `j` grows, and that of
a row lies between those of any row above and any row below it. Rows are solved at distance N/2,
then N/4 and so on, all rows of one distance together in numpy; each such pass looks at no more than
2N pairs, so one more cluster costs O(N log N). docs/cutoffs.md has the proof. The plain O(K N^2)
loop stands beside it as `optimal_cutoffs_ref`.

With whole counts all sums are 64-bit integers as long as N times the total count is below 2^63, and
the optimum is exact. Larger counts and fractions are summed in float64.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepenough.errors import UserError

Numbers = npt.NDArray[Any]
USUAL_CLUSTERS = 3
MAX_COUNT = 1e200
"""Sums and products of larger numbers could be infinite."""


@dataclass(frozen=True)
class Partition:
    """A way to cut the vocabulary: `cutoffs` as torch takes them, without the vocabulary size."""

    cutoffs: list[int]
    cost: float


def optimal_cutoffs(masses: npt.ArrayLike, clusters: int) -> Partition:
    """Return the exact minimum of (1) over all ways to cut the tokens, in the order given.

    Masses are counts or probabilities; where they descend, the result is also the best of all
    partitions of the tokens, intervals or not. The head is one of the clusters. The cost is that of
    masses scaled to sum to 1. Among equal optima the last cutoff is the smallest possible, then the
    one before it, and so on.
    """
    checked = _check(masses, clusters)
    prefix = _prefix_sums(checked)
    end = len(checked)
    value = np.arange(end + 1) * prefix  # D_1
    best_cuts = []
    for k in range(2, clusters + 1):
        first = end if k == clusters else k  # of the last cluster only row N is wanted
        value, cuts = _add_cluster(value, prefix, k, first)
        best_cuts.append(cuts.astype(np.int32))  # with many clusters, most of the memory
    cutoffs = _trace_back(best_cuts, end)
    return Partition(cutoffs, partition_cost(checked, cutoffs))


def cutoffs_by_share(masses: npt.ArrayLike, clusters: int) -> Partition:
    """Return cutoffs for ids that are not quite in the order of frequency.

    Each cluster has as much of the text as in the optimum of the sorted masses. So frequent tokens
    are in the head even where rare ones, such as single bytes, have the first ids; tails, whose
    states are narrower, are for the rare.
    """
    values = _check(masses, clusters)
    ranked = np.sort(values)[::-1]
    best = np.array(optimal_cutoffs(ranked, clusters).cutoffs, dtype=np.int64)
    ends = np.searchsorted(np.cumsum(values), np.cumsum(ranked)[best - 1]) + 1
    cutoffs = sorted({min(int(end), len(values) - 1) for end in ends})
    return Partition(cutoffs, partition_cost(values, cutoffs))


def partition_cost(masses: npt.ArrayLike, cutoffs: Sequence[int]) -> float:
    """Return the cost (1) of given cutoffs, masses scaled to sum to 1."""
    values = np.asarray(masses, dtype=np.float64)
    bounds = [0, *cutoffs, len(values)]
    cost = sum((j - i) * values[i:j].sum() for i, j in itertools.pairwise(bounds))
    return float(cost / (values.sum() or 1.0))  # tokens that never occur cost nothing


def optimal_cutoffs_ref(masses: npt.ArrayLike, clusters: int) -> Partition:
    """Return what `optimal_cutoffs` does, by the O(K N^2) double loop over Python numbers."""
    checked = _check(masses, clusters)
    end = len(checked)
    prefix = [0, *itertools.accumulate(checked.tolist())]
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
    try:
        values = np.asarray(masses)
    except (ValueError, OverflowError):  # lists of several lengths
        values = np.empty(0)
    truths = isinstance(masses, list | tuple) and any(isinstance(mass, bool) for mass in masses)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iubf" or truths:
        raise UserError("Token counts must be a non-empty list of numbers; check the input.")
    if not np.isfinite(values).all() or (values < 0).any():
        raise UserError("Token counts must be finite and not negative; check the input.")
    if float(values.max()) > MAX_COUNT:
        raise UserError(f"Token counts must be at most {MAX_COUNT:g}; give them in larger units.")
    whole = isinstance(clusters, int | np.integer) and not isinstance(clusters, bool)
    if not whole or not 1 <= clusters <= len(values):
        raise UserError(
            f"The number of clusters must be from 1 to {len(values)}, the number of tokens, "
            f"not {clusters!s:.40}."
        )
    return values


def _prefix_sums(values: Numbers) -> Numbers:
    """Return `P`, of N + 1 entries: int64 where every sum and product of (2) fits, else float64."""
    largest = float(values.sum(dtype=np.float64)) * len(values)
    exact = values.dtype.kind in "iub" and largest < 2.0**63 * (1 - 1e-9)
    # Where the machine has a longer float, it keeps the sums correct to about the last bit.
    sums = np.cumsum(values, dtype=np.int64 if exact else np.longdouble)
    return np.concatenate(([0], sums)).astype(np.int64 if exact else np.float64)


def _add_cluster(
    previous: Numbers, prefix: Numbers, k: int, first: int
) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """Return D_k[j] of (2) and its smallest best `i` for all j from `first`, from D_(k-1)."""
    end = len(prefix) - 1
    value = np.zeros_like(previous)
    cuts = np.zeros(end + 1, dtype=np.int64)
    cuts[first - 1] = k - 1  # stands for the row above the first one: no cut lies further left
    distance = 1 << (end - first + 1).bit_length()
    while distance := distance // 2:
        # Rows at odd multiples of `distance`; their neighbours at even multiples are solved.
        rows = np.arange(first - 1 + distance, end + 1, 2 * distance)
        low = cuts[rows - distance]
        high = rows - 1
        solved = rows + distance <= end
        high[solved] = np.minimum(high[solved], cuts[rows[solved] + distance])
        # All pairs of these rows in one flat array: row after row, `i` ascending.
        lengths = high - low + 1
        starts = np.cumsum(lengths) - lengths
        i = np.arange(lengths.sum()) + np.repeat(low - starts, lengths)
        j = np.repeat(rows, lengths)
        costs = previous[i] + (j - i) * (prefix[j] - prefix[i])
        value[rows] = np.minimum.reduceat(costs, starts)
        hits = np.flatnonzero(costs == np.repeat(value[rows], lengths))
        cuts[rows] = i[hits[np.searchsorted(hits, starts)]]  # the first hit of each row
    return value, cuts


def _trace_back(best_cuts: Sequence[Numbers], end: int) -> list[int]:
    """Return the cutoffs, ascending, that lead to D_K[N]."""
    cutoffs: list[int] = []
    for cuts in reversed(best_cuts):
        end = int(cuts[end])
        cutoffs.append(end)
    return cutoffs[::-1]


def read_counts(path: str) -> Numbers:
    """Return the numbers of a text file in their order: int64 if all are whole, else float64.

    The file holds either numbers between white space, or lines `token<TAB>count`; the first line
    decides, by having exactly one tab. It is read as bytes, so tokens may be in any encoding.
    """
    try:
        text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(
            f"The file {path} cannot be read ({error.strerror}): give a file of counts."
        ) from error
    lines = [line for line in text.split(b"\n") if line.strip()]
    if not lines:
        raise UserError(f"The file {path} holds no counts; give one number per token.")
    fields = text.split()
    if lines[0].count(b"\t") == 1:
        fields = [line.rpartition(b"\t")[2] for line in lines]
    counts = np.array([_number(field, path) for field in fields])
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise UserError(f"The counts in {path} must be finite and not negative; correct the file.")
    if not counts.any():
        raise UserError(f"The counts in {path} are all zero; give those of a text.")
    return counts


def _number(field: bytes, path: str) -> int | float:
    try:
        number = float(field)
        return int(field) if field.strip().isdigit() and number < 2**63 else number
    except ValueError as error:
        shown = field.decode("utf-8", "replace").strip()[:40]
        raise UserError(
            f"{shown!r} in {path} is not a number; give counts between white space or lines "
            "token<TAB>count."
        ) from error
