"""Optimal cutoffs of an adaptive softmax: the cheapest way to cut a vocabulary into clusters.

The adaptive softmax (arXiv 1609.04309; torch's `AdaptiveLogSoftmaxWithLoss`) cuts the tokens,
frequent ones first, into consecutive clusters. A cluster of `size` tokens and probability `mass`
costs `size * mass`: it has that many outputs and is evaluated that often. With `P` the running sum
of the masses and `0 = c_0 < c_1 < ... < c_K = N`, this file minimises

    sum_k (c_k - c_(k-1)) * (P[c_k] - P[c_(k-1)])                                            (1)

exactly, by dynamic programming over the number of clusters:

    D_k[j] = min_(i<j)  D_(k-1)[i] + w(i, j),      w(i, j) = (j - i) * (P[j] - P[i])         (2)

For a <= b <= c <= d, w(a,d) + w(b,c) - w(a,c) - w(b,d) = (b-a)(P[d]-P[c]) + (d-c)(P[b]-P[a]) >= 0:
the quadrangle inequality, whatever the order of the tokens. So the best `i` never moves left as `j`
grows, and that of a row lies between those of any row above and any row below it. Rows are solved
at distance N/2, then N/4 and so on, all rows of one distance together in numpy; each such pass
looks at no more than 2N pairs, so one more cluster costs O(N log N). The plain O(K N^2) loop stands
beside it as `optimal_cutoffs_ref`.

Exactness: with whole counts all sums are 64-bit integers as long as N times the total count is
below 2^63, and the optimum is exact. Larger counts and fractions are summed in float64; then the
cost found exceeds the optimum by rounding at most: K * log2(N) * 1e-15 of N, the cost of a single
cluster.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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


def optimal_cutoffs(masses: npt.ArrayLike, clusters: int) -> Partition:
    """Return the exact minimum of (1) over all ways to cut the tokens, in the order given.

    Args:
        masses: How often each token occurs: counts or probabilities. In descending order the result
            is also the best of all partitions of the tokens, intervals or not.
        clusters: Number of clusters, the head included.

    Returns:
        The cutoffs and their cost, masses scaled to sum to 1. Among equal optima the last cutoff is
        the smallest possible, then the one before it, and so on.
    """
    checked = _check(masses, clusters)
    prefix = _prefix_sums(checked)
    end = len(checked)
    value = np.arange(end + 1) * prefix  # D_1
    best_cuts: list[Positions] = []
    for k in range(2, clusters):
        reach = _reach(checked, k, clusters)
        value, cuts = _add_cluster(value, prefix[: reach + 1], k)
        best_cuts.append(cuts.astype(np.int32))  # with many clusters, most of the memory
    if clusters > 1:  # of the last cluster only its row N is wanted
        last = np.zeros(end + 1, dtype=np.int64)
        last[end], _ = _solve_row(value, prefix, clusters, end)
        best_cuts.append(last)
    cutoffs = _trace_back(best_cuts, end)
    return Partition(cutoffs, partition_cost(checked, cutoffs))


def partition_cost(masses: npt.ArrayLike, cutoffs: Sequence[int]) -> float:
    """Return the cost (1) of given cutoffs, masses scaled to sum to 1."""
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
    """Return what `optimal_cutoffs` does, by the O(K N^2) double loop over Python numbers."""
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
        raise UserError("Token counts must be a non-empty list of numbers; check the input.")
    if not np.isfinite(values).all() or (values < 0).any():
        raise UserError("Token counts must be finite and not negative; check the input.")
    if not 1 <= clusters <= len(values):
        raise UserError(
            f"The number of clusters must be from 1 to {len(values)}, the number of tokens, "
            f"not {clusters}."
        )
    return values


def _prefix_sums(values: Numbers) -> Numbers:
    """Return `P`, of N + 1 entries: int64 where every sum and product of (2) fits, else float64."""
    exact = values.dtype.kind in "iub" and (
        # The float sum decides first whether the integer sum can be trusted not to wrap around.
        float(values.sum(dtype=np.float64)) < 2.0**62
        and int(values.sum(dtype=np.int64)) * len(values) < 2**63
    )
    # Where the machine has a longer float, it keeps the sums correct to about the last bit.
    sums = np.cumsum(values, dtype=np.int64 if exact else np.longdouble)
    return np.concatenate(([0], sums)).astype(np.int64 if exact else np.float64)


def _reach(values: Numbers, k: int, clusters: int) -> int:
    """Return how far the first `k` of `clusters` clusters can extend at the smallest best cuts.

    For a given set of sizes it is best to give descending masses ascending sizes (rearrangement
    inequality). Were the last cluster smaller than the average, another order of the sizes would
    be as good with an earlier last cut. So the first k clusters hold at most k/K of the tokens.
    """
    descending = bool((values[:-1] >= values[1:]).all())
    return len(values) * k // clusters if descending else len(values)


def _add_cluster(previous: Numbers, prefix: Numbers, k: int) -> tuple[Numbers, Positions]:
    """Return D_k[j] of (2) and its smallest best `i`, k <= j < len(prefix), from D_(k-1).

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
    """Return the smallest best `i` of one row among all k-1 <= i < j, and its value."""
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
    """Return the cutoffs, ascending, that lead to D_K[N]."""
    cutoffs: list[int] = []
    for cuts in reversed(best_cuts):
        end = int(cuts[end])
        cutoffs.append(end)
    return cutoffs[::-1]


def _total(total: Any) -> Any:
    """Return what masses are divided by; tokens that never occur cost nothing."""
    return total if total > 0 else 1


# -- counts of tokens ------------------------------------------------------------------------------


def read_counts(path: str | os.PathLike[str]) -> Numbers:
    """Return the numbers of a text file in their order: int64 if all are whole, else float64.

    The file holds either numbers between white space, or lines `token<TAB>count`; the first line
    decides, by having exactly one tab. It is read as bytes, so tokens may be in any encoding.
    """
    text = _file(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    if _first_line(text).count(b"\t") == 1:
        lines = text.split(b"\n")
        fields = [line.rpartition(b"\t")[2] for line in lines if line and not line.isspace()]
    else:
        fields = text.split()
    if not fields:
        raise UserError(f"The file {path} holds no counts; give one number per token.")
    try:
        counts = _numbers(fields)
    except ValueError as error:
        field = next(field for field in fields if not _is_number(field))
        shown = field.decode("utf-8", "replace").strip()[:40]
        raise UserError(
            f"{shown!r} in {path} is not a number; give counts between white space or lines "
            "token<TAB>count."
        ) from error
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise UserError(f"The counts in {path} must be finite and not negative; correct the file.")
    if not counts.any():
        raise UserError(f"The counts in {path} are all zero; give those of a text.")
    return counts


def count_tokens(run: str) -> Numbers:
    """Return how often each token id occurs in the text that a language model was trained on."""
    from deepenough.config import resolve  # here: the data package takes seconds to load
    from deepenough.data.config import DatasetConfig
    from deepenough.data.tokens import prepare
    from deepenough.runs import read_config, read_section

    dataset = resolve(DatasetConfig, overrides=read_section(run, "dataset"))
    return prepare(str(read_config(run)["data"]), dataset).tokens["train"].vocab_counts()


def _file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.exists() or file.is_dir():  # a pipe is welcome
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"The file {path} {kind}; give the path of a file.")
    if not os.access(file, os.R_OK):
        raise UserError(f"The file {path} may not be read; change its permissions.")
    return file


def _first_line(text: bytes) -> bytes:
    """Return the first line that is not blank."""
    start = len(text) - len(text.lstrip())
    # The token itself may begin with white space: go back to where its line begins.
    return text[text.rfind(b"\n", 0, start) + 1 :].partition(b"\n")[0]


def _numbers(fields: list[bytes]) -> Numbers:
    try:
        counts = np.array(list(map(int, fields)))
    except ValueError:
        counts = None
    # Python's integers have no limit; those beyond int64 arrive as another type.
    if counts is None or counts.dtype != np.int64:
        counts = np.array(list(map(float, fields)))
    return counts


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


# -- the command -----------------------------------------------------------------------------------
