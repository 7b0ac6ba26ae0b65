"""Intervals of what a comparison measures; each says how far another measurement may lie.

- **Times**: the median of the rounds, between two of the rounds themselves. Of `n` rounds in order,
  the median of the distribution lies between the `k`-th lowest and the `k`-th highest with
  probability `1 - 2 P(B < k)`, `B` binomial of `n` and 1/2; the greatest `k` that suffices is
  taken. No shape of the noise is assumed, and one slow round moves nothing.
- **Shares** (accuracy, exact match, agreement): Wilson's interval, which is honest near 0 and 1.
- **Perplexity**: the bootstrap over segments of the text, resampled with replacement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 1000


class Interval(NamedTuple):
    """A value, and between what it is trusted to lie."""

    value: float
    low: float
    high: float

    def meets(self, other: Interval) -> bool:
        """Whether the two have a value in common."""
        return self.low <= other.high and other.low <= self.high


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median, between the order statistics that have this coverage; else the extremes.

    With fewer than 6 values not even the extremes are sure at 95 %: `coverage` tells.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered), confidence)
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank])


def coverage(num: int, confidence: float = CONFIDENCE) -> float:
    """How sure the interval of so many values really is."""
    return 1 - 2 * _tail(num, _rank(num, confidence))


def _rank(num: int, confidence: float) -> int:
    """The greatest k for which `1 - 2 P(B < k)` suffices, at least 1."""
    rank = 1
    while rank < num // 2 and 1 - 2 * _tail(num, rank + 1) >= confidence:
        rank += 1
    return rank


def _tail(num: int, rank: int) -> float:
    """P(B < rank), B binomial of `num` and 1/2."""
    return float(sum(math.comb(num, each) for each in range(rank)) / 2**num)


def share_interval(right: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval of `right` out of `total`."""
    share = right / total
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    shrink = 1 + z * z / total
    middle = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # Rounding must not put the value itself outside.
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def perplexity_interval(
    losses: Sequence[float],
    tokens: Sequence[int],
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """`exp(sum of losses / sum of tokens)`; both are given by segment, and resampled so."""
    loss, count = np.asarray(losses, dtype=float), np.asarray(tokens, dtype=float)
    draws = np.random.default_rng(seed).multinomial(
        len(loss), np.full(len(loss), 1 / len(loss)), size=RESAMPLES
    )
    means = (draws @ loss) / (draws @ count)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    value = loss.sum() / count.sum()
    return Interval(_exp(value), _exp(min(low, value)), _exp(max(high, value)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
