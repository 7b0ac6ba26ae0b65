"""What a comparison measures: candidates, operating points, scores and their intervals.

A method offers its finished runs as `Candidate`s; `deepenough compare` measures all of them under
one protocol. The intervals say how far another measurement may lie:

- **Times**: the median of the rounds, between two of the rounds themselves. Of `n` rounds in order,
  the median of the distribution lies between the `k`-th lowest and the `k`-th highest with
  probability `1 - 2 P(B < k)`, `B` binomial of `n` and 1/2. No shape of the noise is assumed, and
  one slow round moves nothing.
- **Shares** (accuracy, exact match, agreement): Wilson's interval, which is honest near 0 and 1.
- **Perplexity**: the bootstrap over segments of the text, resampled with replacement.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from deepenough.config import TrustConfig, bounded
from deepenough.errors import UserError


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
    is_counted: bool = True
    """Whether torch's counter of FLOPs sees what it computes; compiled code it does not."""


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
    sample: Sample | None = None


@dataclass(frozen=True)
class Sample:
    """One answer with its depths, to be looked at."""

    tokens: Sequence[str]
    depth: Sequence[float | None] = bounded(ge=0)
    """Of each token, None for one of the prompt."""
    layers: float = bounded(gt=0)
    """The greatest depth there is."""

    def check(self) -> None:
        """Refuse tokens without a depth, and depths without a token."""
        if len(self.tokens) != len(self.depth):
            raise UserError("A sample needs a depth for each of its tokens.")


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One operating point of one run as it was measured: a row of `frontier.json`."""

    run: str
    mechanism: str
    name: str
    settings: Mapping[str, Any]
    command: str
    quality: float
    quality_low: float
    quality_high: float
    units: int = bounded(ge=1)
    layers: float = bounded(ge=0)
    flops: float = bounded(ge=0)
    flops_counted: float | None = bounded(ge=0)
    milliseconds: float = bounded(gt=0)
    milliseconds_low: float
    milliseconds_high: float
    relative_time: float = bounded(gt=0)
    relative_time_low: float
    relative_time_high: float
    sample: Sample | None
    folder: str = ""
    optimal: Sequence[str] = ()
    """The costs by which no other point beats it."""

    def check(self) -> None:
        """Refuse a value outside of its interval."""
        for name in ("quality", "milliseconds", "relative_time"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} must lie within its interval.")

    def times_as_fast(self, other: Self) -> tuple[float, float, float]:
        """Return how many times as fast as another a point is, and the widest ends there can be."""
        low = other.relative_time_low / self.relative_time_high
        least = self.relative_time_low
        high = other.relative_time_high / least if least > 0 else math.inf
        return other.relative_time / self.relative_time, low, high


@dataclass(frozen=True)
class Comparison:
    """All that `frontier.json` holds."""

    command: str
    task: ComparedTask
    protocol: Mapping[str, int | str]
    """How points were timed: `rounds`, `threads`, `processor`, `seed`."""
    bookkeeping: float
    """Time without a model at work, as a share of the rest."""
    points: Sequence[FrontierPoint]
    provenance: Mapping[str, Any]

    def name_of(self, row: FrontierPoint) -> str:
        """Return what a point is called: with its run, where there are several."""
        several = len({point.run for point in self.points}) > 1
        return f"{row.run} {row.name}" if several else row.name


class Candidate(Protocol):
    """A run that can be measured at operating points."""

    name: str
    """What the chart calls the run."""
    mechanism: str
    """What decides its depth, which gives its points their colour."""
    task: ComparedTask
    """What it is measured on."""

    def points(self) -> Sequence[OperatingPoint]:
        """Return the operating points to measure it at, the deepest first."""

    def run(self, point: OperatingPoint) -> Any:
        """Answer all of the data; this is what is timed."""

    def judge(self, point: OperatingPoint, answers: Any) -> Scores:
        """Return the scores of what `run` returned; this is not timed."""


@dataclass
class ComparedData:
    """What all runs of a comparison answer, and the operating points that were asked for."""

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

    mechanisms: list[str] | None = None
    """Generation: which ways are measured, such as full, speculative and exit; by default all."""

    tuned: str | None = None
    """Generation: folder of deepenough decode tune for the same model; its drafts are measured."""

    trust: TrustConfig = field(default_factory=TrustConfig)

    grid: Any = None
    """Operating points; each list is for the runs it fits, and one left out is chosen for them."""


def content_of(parts: Iterable[object]) -> str:
    """Return a hash of the data, which tells runs apart that split one file differently."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()


CONFIDENCE = 0.95
RESAMPLES = 1000


class Interval(NamedTuple):
    """A value and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median between the order statistics that suffice; with fewer than 6, the extremes.

    Of `n` values in order these are the `k`-th lowest and the `k`-th highest, with the greatest `k`
    for which `1 - 2 P(B < k) >= CONFIDENCE`.
    """
    ordered, num = sorted(values), len(values)
    rank, below = 1, 1 + num  # below: 2^n P(B < rank + 1)
    while rank < num // 2 and 1 - 2 * below / 2**num >= CONFIDENCE:
        rank += 1
        below += math.comb(num, rank)
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank])


def share_interval(right: float, total: int) -> Interval:
    """Return Wilson's interval of `right` out of `total`."""
    share = right / total
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    shrink = 1 + z * z / total
    middle = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # Rounding must not put the value itself outside.
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def resampled_interval(measure: Callable[[np.ndarray], float], num: int) -> Interval:
    """Return a measure of `num` examples, and of as many drawn from them with replacement.

    `measure` takes the numbers of the examples that count, some of them several times.
    """
    draws = np.random.default_rng(0).integers(num, size=(RESAMPLES // 10, num))
    found = [measure(rows) for rows in draws]
    low, high = np.quantile(found, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    value = measure(np.arange(num))
    return Interval(value, min(float(low), value), max(float(high), value))


def perplexity_interval(losses: Sequence[float], tokens: Sequence[int]) -> Interval:
    """Return `exp(sum of losses / sum of tokens)`; both are given by segment and resampled so."""
    loss, count = np.asarray(losses, dtype=float), np.asarray(tokens, dtype=float)
    num = len(loss)
    draws = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), size=RESAMPLES)
    means = (draws @ loss) / (draws @ count)
    low, high = np.quantile(means, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    value = loss.sum() / count.sum()
    ends = (value, min(low, value), max(high, value))
    return Interval(*(math.exp(end) if end < 700 else math.inf for end in ends))


def intervals_of(**found: Interval | None) -> dict[str, Any]:
    """Return what a command's figures carry as `intervals`: the ends of each, None if unknown."""
    return {"intervals": {name: each and [each.low, each.high] for name, each in found.items()}}


def shown(value: Any, ends: Sequence[float] | None = None) -> str:
    """Return a figure as people read it; with an interval, in no more digits than that deserves."""
    if not isinstance(value, int | float):
        return str(value)
    half = (ends[1] - ends[0]) / 2 if ends else 0.0
    if not ends or not 0 < half < math.inf:
        return f"{value:,.4g}"
    digits = max(0, -math.floor(math.log10(half)))
    low, high = (f"{end:,.{digits}f}" for end in ends)
    return f"{value:,.{digits}f} ({low} to {high})"


def figure_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines in which a command shows figures; those with an interval show it."""
    intervals = values.get("intervals", {})
    for name, value in values.items():
        if isinstance(value, list):  # a table: one line per row
            yield from ("  ".join(f"{key} {shown(v)}" for key, v in row.items()) for row in value)
        elif name != "intervals":
            text = shown(value, intervals.get(name))
            if name in intervals and intervals[name] is None:
                text = f"{value:,.2g} (too little text for a confidence interval)"
            yield f"{name.replace('_', ' '):24}{text}"
    if intervals:
        yield "in brackets: 95 % confidence intervals"
