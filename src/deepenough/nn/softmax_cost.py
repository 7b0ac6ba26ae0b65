"""What the clusters of an adaptive softmax cost on this machine, in seconds of one training step.

`size * mass` counts multiplications. A real cluster also has a projection, a log-softmax, gradients
of all its weights and a price of its own however small it is; and narrow matrices multiply at a
lower rate. So each part of torch's `AdaptiveLogSoftmaxWithLoss` is run here, forward and backward,
over a small grid of rows (tokens that fall into the cluster) and words, and fitted by

    seconds = fixed + per_row * rows + per_word * words + per_product * rows * words

with no coefficient below zero, so that time never falls as a cluster grows. Each tail has its own
fit, because its width `d_model // div_value**(t+1)` is its own. The fit minimises the relative
error: a small cluster matters as much as a large one. Words and rows beyond the grid (it is bounded
by memory) are extrapolated. Not counted: the optimiser's update of the weights.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from deepenough.errors import UserError
from deepenough.nn.cutoffs import ClusterCost

_MAX_OUTPUTS = 1 << 23
"""Rows times words of the largest product that is timed: four float32 copies of it are 128 MB."""

_MIN_WORDS = 32
_MIN_ROUNDS = 3
_PATIENCE = 15.0
"""Seconds of timing after which no more rounds are begun."""


@dataclass(frozen=True)
class SoftmaxCost:
    """The fitted costs: `head` at all rows, `tails[t]` by words and by the share of the rows."""

    head: ClusterCost
    tails: list[ClusterCost]
    relative_error: float
    """Median of |fitted - measured| / measured over the grid."""
    num_points: int

    def seconds(self, masses: npt.NDArray[Any], cutoffs: Sequence[int]) -> float:
        """The fitted time of one training step with these cutoffs."""
        bounds = [*cutoffs, len(masses)]
        shares = masses / masses.sum(dtype=np.float64)
        # In the head every tail has an output of its own beside the words.
        total = self.head(bounds[0] + len(cutoffs), 1.0)
        for tail, (start, stop) in zip(self.tails, itertools.pairwise(bounds), strict=False):
            total += tail(stop - start, float(shares[start:stop].sum()))
        return total


@dataclass
class Point:
    """One place of the grid and its fastest time so far; `width` 0 is the head, not projected."""

    width: int
    rows: int
    words: int
    seconds: float = float("inf")


@dataclass(frozen=True)
class LayerShape:
    """The layer to be measured, apart from its vocabulary."""

    d_model: int
    div_value: float = 4.0
    batch_tokens: int = 1024

    def __post_init__(self) -> None:
        if min(self.d_model, self.batch_tokens) < 1 or not self.div_value >= 1:
            raise UserError(
                "Measuring needs a width, a batch and a division value of at least 1; "
                "correct the one that is less."
            )

    def tail_widths(self, num_tails: int) -> list[int]:
        """The widths that torch gives the tails, as far as they are not zero."""
        widths = [int(self.d_model // self.div_value ** (t + 1)) for t in range(num_tails)]
        return [width for width in widths if width > 0]


def measure_softmax_cost(
    vocab_size: int,
    shape: LayerShape,
    max_clusters: int = 5,
    rounds: int = 15,
    track: Callable[[Sequence[Point]], Iterable[Point]] = iter,
) -> SoftmaxCost:
    """Time and fit the parts of an adaptive softmax for up to `max_clusters` clusters.

    The whole grid is run `rounds` times, fewer if that takes long, and the fastest time of a place
    counts, so that a busy moment of the machine spoils no single place. `track` may wrap the work
    to show its progress.
    """
    widths = shape.tail_widths(max_clusters - 1)
    points = _grid(vocab_size, shape.batch_tokens, widths)
    steps = _Steps(shape, points)
    for point in points:
        steps.run(point)  # the first run pays for allocations that later ones find done
    # In an order that changes, or the same place would always follow the largest one, caches cold.
    shuffle = random.Random(0).sample
    schedule = [point for _ in range(rounds) for point in shuffle(points, len(points))]
    deadline = time.perf_counter() + _PATIENCE
    for num_done, point in enumerate(track(schedule)):
        start = time.perf_counter()
        if start > deadline and num_done >= _MIN_ROUNDS * len(points):
            break
        steps.run(point)
        point.seconds = min(point.seconds, time.perf_counter() - start)
    return _fit_all(points, widths, shape.batch_tokens)


def _grid(vocab_size: int, batch_tokens: int, widths: list[int]) -> list[Point]:
    head_words = max(min(vocab_size, _MAX_OUTPUTS // batch_tokens), 1)
    points = [Point(0, batch_tokens, words) for words in _ladder(_MIN_WORDS, head_words, 6)]
    rows = _ladder(max(batch_tokens // 256, 1), batch_tokens, 5)
    words = _ladder(_MIN_WORDS, vocab_size, 5)
    # A tail is for rare words: one that is large and yet takes most tokens is never worth having.
    limit = max(min(_MAX_OUTPUTS, batch_tokens * vocab_size // 8), rows[0] * words[0])
    for width, r, w in itertools.product(widths, rows, words):
        if r * w <= limit:
            points.append(Point(width, r, w))
    return points


class _Steps:
    """Forward and backward of one part, as `AdaptiveLogSoftmaxWithLoss` does it; weights shared."""

    def __init__(self, shape: LayerShape, points: list[Point]) -> None:
        d_model = shape.d_model
        source = torch.Generator().manual_seed(0)
        self.batch = torch.randn(shape.batch_tokens, d_model, generator=source)
        # The tokens of a cluster lie scattered over the batch.
        self.order = torch.randperm(shape.batch_tokens, generator=source)
        self.projections: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        for width in {point.width for point in points}:
            words = max(point.words for point in points if point.width == width)
            self.projections[width] = torch.randn(width, d_model, generator=source) * d_model**-0.5
            self.outputs[width] = torch.randn(words, width or d_model, generator=source) * 0.02

    def run(self, point: Point) -> None:
        # Fresh leaves on old memory: gradients are made anew, as after zero_grad().
        hidden = batch = self.batch.detach().requires_grad_()
        weight = self.outputs[point.width][: point.words].detach().requires_grad_()
        targets = torch.zeros(point.rows, 1, dtype=torch.int64)
        output = torch.zeros(len(batch))
        rows = (self.order < point.rows).nonzero().squeeze(1)
        if point.width:
            projection = self.projections[point.width].detach().requires_grad_()
            hidden = F.linear(batch.index_select(0, rows), projection)
        log_probs = F.log_softmax(F.linear(hidden, weight), dim=1)
        output.index_copy_(0, rows, log_probs.gather(1, targets).squeeze(1))
        (-output).mean().backward()


def _fit_all(points: list[Point], widths: list[int], batch_tokens: int) -> SoftmaxCost:
    errors: list[float] = []

    def fit(width: int) -> npt.NDArray[np.float64]:
        own = [point for point in points if point.width == width]
        # The head sees all rows every time: there is nothing to tell rows from a constant by.
        columns = [
            (1.0, p.rows, p.words, p.rows * p.words) if width else (1.0, p.words) for p in own
        ]
        features, seconds = np.array(columns, dtype=np.float64), np.array([p.seconds for p in own])
        coefficients = fit_non_negative(features, seconds)
        errors.extend(np.abs(features @ coefficients / seconds - 1))
        return coefficients

    fixed, per_word = fit(0).tolist()
    head = ClusterCost(fixed, per_word, 0.0, 0.0)
    tails = []
    for width in widths:
        fixed, per_row, per_word, per_product = fit(width).tolist()
        tails.append(
            ClusterCost(fixed, per_word, batch_tokens * per_row, batch_tokens * per_product)
        )
    return SoftmaxCost(head, tails, float(np.median(errors)), len(points))


def fit_non_negative(
    features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Coefficients >= 0 of least squared relative error.

    The optimum is an ordinary least squares over some subset of the features; with four features
    there are 15 subsets, so all are tried.
    """
    scaled = features / seconds[:, None]
    best, best_error = np.zeros(features.shape[1]), float("inf")
    for size in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), size):
            # Columns differ by many orders of magnitude; equal norms keep the solution accurate.
            part = scaled[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            solution = np.linalg.lstsq(part / norms, np.ones(len(seconds)), rcond=None)[0] / norms
            error = float(np.sum((part @ solution - 1) ** 2))
            if (solution >= 0).all() and error < best_error:
                best = np.zeros(features.shape[1])
                best[list(chosen)] = solution
                best_error = error
    return best


def _ladder(low: int, high: int, steps: int) -> list[int]:
    """Whole numbers from low to high in equal ratios; fewer where they would coincide."""
    low = min(low, high)
    return sorted({round(value) for value in np.geomspace(low, high, steps).tolist()})
