"""How much of each layer a map from an earlier one explains: r^2, the mean over output dimensions.

    r^2 = mean over k of 1 - sum (h_j[k] - predicted[k])^2 / sum (h_j[k] - mean[k])^2

as scikit-learn's `r2_score` with its uniform average: a dimension that never varies counts 1 if it
is predicted exactly and 0 otherwise. Tables are `(L + 1, L + 1)`, NaN where there is no map; the
diagonal is 1.

There are two ways. `R2` predicts, position by position: half the work where statistics are not
needed for anything else. `r2_from` needs no states at all, only the statistics of the same pairs.
`R2` predicts in the precision of states and maps and sums in float64: with float32 states it agrees
with float64 to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepenough.shortcut.statistics import Statistics, check_states

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
            self._add([state[start : start + _ROWS] for state in states])

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

    def _add(self, states: list[Tensor]) -> None:
        exact = [state.double() for state in states]
        if self.count == 0:
            # Sums around the first mean keep their digits where a mean is far from zero.
            self.shift = torch.stack([state.mean(0) for state in exact])
            self.sums = torch.zeros_like(self.shift)
            self.squares = torch.zeros_like(self.shift)
            self.residuals = {pair: torch.zeros_like(self.shift[0]) for pair in self.pairs}
        self.count += len(states[0])
        for layer, state in enumerate(exact):
            shifted = state - self.shift[layer]
            self.sums[layer] += shifted.sum(0)
            self.squares[layer] += _column_squares(shifted)
        for (i, j), residual in self.residuals.items():
            match self.find(i, j):
                case None:
                    left = exact[j] - exact[i]
                case matrix, bias:
                    is_single = matrix.dtype == states[i].dtype == torch.float32
                    rows = states if is_single else exact
                    left = torch.addmm(rows[j], rows[i], matrix.to(rows[i]).T, alpha=-1)
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
    """Sum of squares of each column, of a tensor that is not needed any more."""
    return rows.square_().sum(0, dtype=torch.float64)


def _empty(num: int) -> Tensor:
    table = torch.full((num, num), float("nan"), dtype=torch.float64)
    table.fill_diagonal_(1.0)
    return table
