"""What a comparison measures: candidates, operating points, scores and their intervals.

A method offers its finished runs as `Candidate`s; `deepenough compare` measures all of them under
one protocol. The intervals say how far another measurement may lie:

- **Times**: the median of the rounds, between two of the rounds themselves. Of `n` rounds in order,
  the median of the distribution lies between the `k`-th lowest and the `k`-th highest with
  probability `1 - 2 P(B < k)`, `B` binomial of `n` and 1/2; the greatest `k` that suffices is
  taken. No shape of the noise is assumed, and one slow round moves nothing.
- **Shares** (accuracy, exact match, agreement): Wilson's interval, which is honest near 0 and 1.
- **Perplexity**: the bootstrap over segments of the text, resampled with replacement.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from deepenough.config import bounded


@dataclass(frozen=True)
class ComparedTask:
    """What is measured. Runs are compared only where all of it is the same."""

    kind: str
    """As a sentence says it: "language modelling", "classification"."""
    data: str
    split: str
    unit: str
    """What costs are counted for: token, example, sentence."""
    quality: str
    """Name of the measure of quality."""
    higher_is_better: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else must agree: the tokenizer, the shape of batches."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.data} ({self.split})"


@dataclass(frozen=True)
class OperatingPoint:
    """One way to run a candidate."""

    name: str
    """Short, for a chart."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    mechanism: str = ""
    """Where it is another than its candidate's."""
    command: str = ""
    """What runs the model so; empty where no command does."""


@dataclass(frozen=True)
class Scores:
    """What the answers of one pass over the data were worth, and what they cost by the trace."""

    quality: Interval
    units: int
    """Tokens, examples or sentences that were answered."""
    layers: float
    """Blocks that ran for a unit, mean."""
    flops: float
    """Of all units."""
    sample: Mapping[str, Any] | None = None
    """One answer with its depths, to be looked at: `tokens`, `depth` of each, and `layers`."""


class Candidate(Protocol):
    """A run that can be measured at operating points."""

    @property
    def name(self) -> str:
        """Return what the chart calls the run."""

    @property
    def mechanism(self) -> str:
        """Return the mechanism that decides its depth, which gives the point its colour."""

    @property
    def task(self) -> ComparedTask:
        """Return what it is measured on."""

    def points(self) -> Sequence[OperatingPoint]:
        """Return the operating points to measure it at, the deepest first."""

    def run(self, point: OperatingPoint) -> Any:
        """Answer all of the data; this is what is timed."""

    def judge(self, point: OperatingPoint, answers: Any) -> Scores:
        """Return the scores of what `run` returned; this is not timed."""


class OpenGrid:
    """Operating points that are all left to the method."""

    def __getattr__(self, name: str) -> None:
        """Return None for every list of operating points."""
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass
class ComparedRun:
    """One run of a comparison."""

    run: str
    """Folder of a finished run."""

    name: str | None = None
    """What the chart calls it; by default the end of its path."""

    mechanisms: list[str] | None = None
    """Which of its ways to run are measured, such as full, speculative and exit; by default all."""

    tuned: str | None = None
    """Writing: folder of deepenough exit tune for the same model; its drafts take part."""

    grid: Any = field(default_factory=OpenGrid)
    """Operating points that were asked for: the fields of the methods' grids, None if left open."""


@dataclass
class ComparedData:
    """Data that all runs of a comparison answer."""

    data: str | None = None
    """A text or data set, named as for training; by default what the runs were trained on."""

    split: str | None = None
    """Part of it; by default test, else valid, but valid first for classifiers and for prompts."""

    limit: int | None = bounded(None, ge=1)
    """At most so many segments, examples, sentences or prompts; by default as many as fit into
    about a minute."""

    batch_size: int | None = bounded(None, ge=1)
    """Streams or examples at once; by default as in training, and 32 examples."""

    prompt_tokens: int = bounded(32, ge=1)
    """Generation: tokens of a prompt."""

    new_tokens: int = bounded(32, ge=1)
    """Generation: tokens that follow it."""


def content_of(parts: Iterable[object]) -> str:
    """Return a hash of the data, which tells runs apart that split one file differently."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()


CONFIDENCE = 0.95
RESAMPLES = 1000


class Interval(NamedTuple):
    """A value, and between what it is trusted to lie."""

    value: float
    low: float
    high: float

    def meets(self, other: Interval) -> bool:
        """Return whether the two have a value in common."""
        return self.low <= other.high and other.low <= self.high


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median, between the order statistics that have this coverage; else the extremes.

    With fewer than 6 values not even the extremes are sure at 95 %: `coverage` tells.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered), confidence)
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank])


def coverage(num: int, confidence: float = CONFIDENCE) -> float:
    """Return the confidence that the interval of `num` values really has."""
    return 1 - 2 * _tail(num, _rank(num, confidence))


def _rank(num: int, confidence: float) -> int:
    """Return the greatest k for which `1 - 2 P(B < k)` suffices, at least 1."""
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
