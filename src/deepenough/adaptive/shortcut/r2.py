"""How much of each layer a map from an earlier one explains: r^2, the mean over output dimensions.

    r^2 = mean over k of 1 - sum (h_j[k] - predicted[k])^2 / sum (h_j[k] - mean[k])^2

as scikit-learn's `r2_score` with its uniform average: a dimension that never varies counts 1 if it
is predicted exactly and 0 otherwise. Tables are `(L + 1, L + 1)`, NaN where there is no map; the
diagonal is 1.

There are two ways. `R2` predicts, position by position: half the work where statistics are not
needed for anything else. `r2_from` needs no states at all, only the statistics of the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepenough.adaptive.shortcut.statistics import Statistics, check_states

Map = tuple[Tensor, Tensor | None] | None
"""A matrix and a bias, or None for the identity."""

_ROWS = 512


class R2:
    """r^2 of given maps over a stream of states."""

    def __init__(self, pairs: Iterable[tuple[int, int]], find: Callable[[int, int], Map]) -> None:
        self.pairs, self.find = list(pairs), find
        self.residuals: dict[tuple[int, int], Tensor] = {}
        self.count = 0

    def update(self, states: Sequence[Tensor]) -> None:
        """Add positions: `L + 1` tensors `[n, d]`."""
        check_states(states)
        for start in range(0, len(states[0]), _ROWS):
            # [L + 1, rows, d]
            self._add(torch.stack([state[start : start + _ROWS].double() for state in states]))

    def table(self) -> Tensor:
        """The table for all positions so far."""
        variation = self.squares - self.sums.square() / self.count
        # What is left of a constant dimension by rounding is no variation.
        noise = torch.finfo(torch.float64).eps * (self.squares + self.count * self.shift.square())
        variation = torch.where(variation > noise, variation, 0.0)
        table = _empty(len(self.sums))
        for (i, j), residual in self.residuals.items():
            table[i, j] = _score(residual, variation[j])
        return table

    def _add(self, rows: Tensor) -> None:
        if self.count == 0:
            # Sums around the first mean keep their digits where a mean is far from zero.
            self.shift = rows.mean(1)
            self.sums = torch.zeros_like(self.shift)
            self.squares = torch.zeros_like(self.shift)
            self.residuals = {pair: torch.zeros_like(self.shift[0]) for pair in self.pairs}
        self.count += rows.shape[1]
        for layer, state in enumerate(rows):
            shifted = state - self.shift[layer]
            self.sums[layer] += shifted.sum(0)
            self.squares[layer] += _column_squares(shifted)
        for (i, j), residual in self.residuals.items():
            match self.find(i, j):
                case None:
                    left = rows[j] - rows[i]
                case matrix, bias:
                    left = torch.addmm(rows[j], rows[i], matrix.to(rows).T, alpha=-1)
                    if bias is not None:
                        left -= bias.to(left)
            residual += _column_squares(left)


def r2_from(statistics: Statistics, find: Callable[[int, int], Map]) -> Tensor:
    """The table for the positions of `statistics`, which may be others than the maps' own."""
    statistics.flush()
    n, sums, squares = statistics.count, statistics.sums, statistics.squares
    variation = squares - sums.square() / n
    noise = torch.finfo(torch.float64).eps * squares
    variation = torch.where(variation > noise, variation, 0.0)
    table = _empty(statistics.num_layers + 1)
    for i, targets in statistics.plan.items():
        gram = statistics.gram(i)
        for j in targets:
            cross = statistics.cross(i, j)
            match find(i, j):
                case None:
                    residual = squares[j] - 2 * cross.diagonal() + squares[i]
                case matrix, bias:
                    solved = matrix.to(gram).T
                    # sum over positions of (h_j - A h_i)^2, expanded
                    residual = squares[j] + (solved * (gram @ solved - 2 * cross)).sum(0)
                    if bias is not None:
                        b = bias.to(gram)
                        residual = residual + b * (n * b + 2 * (sums[i] @ solved - sums[j]))
            table[i, j] = _score(residual.clamp_min(0), variation[j])
    return table


def r2_ref(target: Tensor, predicted: Tensor) -> float:
    """Straight from the definition."""
    residual = (target - predicted).square().sum(0)
    return _score(residual, (target - target.mean(0)).square().sum(0))


def _score(residual: Tensor, variation: Tensor) -> float:
    varies = variation > 0
    score = torch.where(
        varies,
        1 - residual / torch.where(varies, variation, 1.0),
        (residual == 0).to(residual.dtype),
    )
    return float(score.mean())


def _column_squares(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=0).square_()


def _empty(num: int) -> Tensor:
    table = torch.full((num, num), float("nan"), dtype=torch.float64)
    table.fill_diagonal_(1.0)
    return table
