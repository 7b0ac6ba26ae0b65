"""Sufficient statistics of linear maps between layers: sums over positions, in float64.

For source `i` with targets `j, k, ...` one matrix holds

    products[i] = H_i^T [H_i H_j H_k ...]        [d, (1 + number of targets) * d]

where the rows of `H_i` are the states of layer `i`. Every map, its r^2 and linear CKA follow from
these, the sums and the sums of squares; nothing is kept per position, and statistics of different
texts or processes add.

Rows are gathered in a buffer of bounded size, where they become float64, and multiplied into the
sums when it is full: small batches then cost no more than large ones. `H_i^T H_i` is symmetric, so
it is computed in panels that begin at their own diagonal; below it the block stays zero. Its
diagonal holds the sums of squares, which are kept apart only for layers that are no source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut.pairs import Plan, plan_bytes

_BUFFER_SHARE = 0.15
"""Size of the buffer as a share of the statistics."""
_MIN_ROWS, _MAX_ROWS = 32, 384
_PANEL = 384


class _Run(NamedTuple):
    """Neighbouring layers `first ... first + num - 1` that stand side by side in a product."""

    first: int
    num: int
    column: int


class Statistics:
    """Sums over positions for the pairs of a plan."""

    def __init__(
        self, num_layers: int, width: int, plan: Plan, device: torch.device | str = "cpu"
    ) -> None:
        self.num_layers, self.width, self.plan = num_layers, width, dict(plan)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.products = {
            source: zeros(width, (1 + len(targets)) * width) for source, targets in plan.items()
        }
        self.sums = zeros(num_layers + 1, width)
        self._squares = zeros(num_layers + 1, width)
        self._count = 0
        self._runs = {source: _runs(targets) for source, targets in plan.items()}
        self._buffer: Tensor | None = None
        self._filled = 0

    @property
    def count(self) -> int:
        """Number of positions."""
        return self._count + self._filled

    @property
    def squares(self) -> Tensor:
        """Sums of squares `[L + 1, d]`."""
        squares = self._squares.clone()
        for source, product in self.products.items():
            squares[source] = product.diagonal()
        return squares

    @property
    def nbytes(self) -> int:
        """Size of the products."""
        return plan_bytes(self.plan, self.width)

    def update(self, states: Sequence[Tensor]) -> None:
        """Add `n` positions: `L + 1` tensors `[n, d]`, row `r` of each the same position."""
        self._check(states)
        buffer = self._rows()
        num, start = len(states[0]), 0
        while start < num:
            taken = min(num - start, len(buffer) - self._filled)
            for layer, state in enumerate(states):
                buffer[self._filled : self._filled + taken, layer].copy_(
                    state[start : start + taken]
                )
            self._filled += taken
            start += taken
            if self._filled == len(buffer):
                self.flush()

    def flush(self) -> None:
        """Bring the rows of the buffer into the sums."""
        if self._buffer is None or self._filled == 0:
            return
        rows = self._buffer[: self._filled]
        self.sums += rows.sum(0)
        for layer in range(self.num_layers + 1):
            if layer not in self.products:
                self._squares[layer] += rows[:, layer].square().sum(0)
        flat, d = rows.view(self._filled, -1), self.width
        for source, product in self.products.items():
            own = flat[:, source * d : (source + 1) * d]
            for top in range(0, d, _PANEL):
                panel = own[:, top : top + _PANEL].T
                product[top : top + _PANEL, top:d].addmm_(panel, own[:, top:])
            for run in self._runs[source]:
                others = flat[:, run.first * d : (run.first + run.num) * d]
                product[:, run.column * d : (run.column + run.num) * d].addmm_(own.T, others)
        self._count += self._filled
        self._filled = 0

    def finish(self) -> Statistics:
        """Bring in what is left and give the buffer's memory back."""
        self.flush()
        self._buffer = None
        return self

    def gram(self, source: int) -> Tensor:
        """`H_i^T H_i`, both halves of it."""
        upper = self.products[source][:, : self.width].triu()
        return upper + upper.triu(1).T

    def cross(self, source: int, target: int) -> Tensor:
        """`H_i^T H_j`, as a view."""
        column = (1 + self.plan[source].index(target)) * self.width
        return self.products[source][:, column : column + self.width]

    def __iadd__(self, other: Statistics) -> Statistics:
        if other.plan != self.plan or other.sums.shape != self.sums.shape:
            raise ValueError("statistics add only if they are of the same pairs and width")
        self.flush()
        other.flush()
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine += theirs.to(mine.device)
        self._count += other._count
        return self

    def all_reduce(self) -> None:
        """Sum over all processes, for all of them."""
        self.finish()
        count = torch.tensor(self._count, device=self.sums.device)
        for tensor in (*self._tensors(), count):
            torch.distributed.all_reduce(tensor)
        self._count = int(count)

    def state_dict(self) -> dict[str, Tensor]:
        """All there is, rows still in the buffer too, so that going on gives the same bits."""
        state = {f"product.{source}": product for source, product in self.products.items()}
        state |= {"sums": self.sums, "squares": self._squares, "count": torch.tensor(self._count)}
        if self._buffer is not None and self._filled:
            state["rows"] = self._buffer[: self._filled]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        own.pop("rows", None)
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"{name} is missing or of another shape")
            tensor.copy_(state[name])
        self._count = int(state["count"])
        self._filled = 0
        if "rows" in state:
            self._filled = len(state["rows"])
            self._rows()[: self._filled].copy_(state["rows"])

    def _tensors(self) -> list[Tensor]:
        return [*self.products.values(), self.sums, self._squares]

    def _rows(self) -> Tensor:
        if self._buffer is None:
            row_bytes = self.sums.numel() * self.sums.element_size()
            num = int(_BUFFER_SHARE * self.nbytes / row_bytes)
            num = min(max(num, _MIN_ROWS), _MAX_ROWS)
            self._buffer = self.sums.new_empty(num, *self.sums.shape)
        return self._buffer

    def _check(self, states: Sequence[Tensor]) -> None:
        check_states(states)
        if len(states) != self.num_layers + 1 or states[0].shape[1] != self.width:
            raise UserError(
                f"{len(states)} states of width {states[0].shape[1]} do not fit: these are "
                f"statistics of {self.num_layers + 1} states of width {self.width}."
            )


def check_states(states: Sequence[Tensor]) -> None:
    """`L + 1` tensors `[n, d]` of one shape."""
    if len(states) < 2:
        raise UserError("Give the states of at least two layers, h_0 and h_1.")
    shape = states[0].shape
    for layer, state in enumerate(states):
        if state.ndim != 2 or state.shape != shape:
            raise UserError(
                f"The states of layer {layer} have the shape {tuple(state.shape)}: give one tensor "
                f"[positions, width] for each layer, all like the first, {tuple(shape)}."
            )


def _runs(targets: Sequence[int]) -> list[_Run]:
    """Neighbouring targets together; the first block of a product is the source's own."""
    runs = []
    for _, members in groupby(enumerate(targets, 1), key=lambda item: item[1] - item[0]):
        (column, first), *others = members
        runs.append(_Run(first, 1 + len(others), column))
    return runs
