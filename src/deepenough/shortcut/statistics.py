"""Sufficient statistics of linear maps, and what follows from them: maps, linear CKA and r^2.

`NormalEquations` is the accumulator that every least-squares fit of this package uses: maps between
layers, linear stand-ins for the parts of a block, and the linear drafter of `decoding`. Of rows
`x` (inputs) and `y` (outputs) it keeps the sums

    products = X^T [X Y]        [inputs, inputs + outputs]

in float64, from which the map `argmin_A sum ||y - A x||^2 + ridge ||A||^2` follows ("Jump to
Conclusions", arXiv 2303.09435, equation 1, which has no ridge):

    (X^T X + ridge I) A^T = X^T Y

An affine map solves the same equations for centred rows and has the bias `mean_y - A mean_x`.
Nothing is kept per row, and sums of different texts or processes add.

`LayerStatistics` keeps such equations for every source layer of a model, with the states of all its
target layers side by side as outputs.

Rows may lie in a subspace: what a layer norm without a bias returns sums to zero over its entries,
and so `X^T X` is singular but for rounding, as all maps that agree on the subspace fit equally
well; one of least norm is taken, from the eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.errors import UserError

#: The target layers of every source layer, all later than the source.
Plan = dict[int, tuple[int, ...]]
Maps = dict[tuple[int, int], Tensor]
Solver = Callable[[Tensor], Tensor]

_WAITING_ROWS = 512
"""Rows of `NormalEquations` that wait until a product costs more than fetching its result."""
_BUFFER_SHARE = 0.15
"""Size of the buffer of `LayerStatistics` as a share of the statistics."""
_MIN_ROWS, _MAX_ROWS = 32, 384
_PANEL = 384
_CKA_PANEL = 64


@dataclass(frozen=True)
class AffineMap:
    """`y = weight x + bias`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Apply the map to rows `[..., inputs]`."""
        return F.linear(hidden, self.weight, self.bias)


class NormalEquations:
    """Sums `X^T X` and `X^T Y` over rows, in float64, and the map that they determine.

    Use: `update(x, y)` with batches of rows of any size, then `solve(...)`.

    `X^T X` is symmetric, so it is computed in panels that begin at their own diagonal; below it the
    block stays zero (`gram` returns both halves).

    Attributes:
        num_inputs: Width of `x`.
        products: `X^T [X Y]`, `[num_inputs, num_inputs + num_outputs]`.
        sums: Sums of `[x y]`.
        count: Number of rows in the sums; those that still wait are not counted.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, device: torch.device | str = "cpu"
    ) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.num_inputs = num_inputs
        self.products = zeros(num_inputs, num_inputs + num_outputs)
        self.sums = zeros(num_inputs + num_outputs)
        self.count = 0
        self._waiting: list[Tensor] = []
        self._dtype = torch.float32

    def update(self, inputs_NI: Tensor, outputs_NO: Tensor) -> None:
        """Add rows: inputs `[N, num_inputs]` and outputs `[N, num_outputs]`."""
        self._waiting.append(torch.cat((inputs_NI, outputs_NO), dim=-1))
        self._dtype = inputs_NI.dtype
        if sum(map(len, self._waiting)) >= _WAITING_ROWS:
            self.flush()

    def flush(self) -> None:
        """Bring the rows that wait into the sums."""
        if not self._waiting:
            return
        rows = torch.cat(self._waiting).double()
        self._waiting.clear()
        inputs, outputs = rows[:, : self.num_inputs], rows[:, self.num_inputs :]
        self.add_products(inputs, [(self.num_inputs, outputs)])
        self.sums += rows.sum(0)
        self.count += len(rows)

    def add_products(self, inputs_NI: Tensor, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Add float64 rows to `products` alone.

        Args:
            inputs_NI: The inputs.
            blocks: Parts of the outputs, each with the column of `products` where it begins.
        """
        num = self.num_inputs
        for top in range(0, num, _PANEL):
            panel = inputs_NI[:, top : top + _PANEL].T
            self.products[top : top + _PANEL, top:num].addmm_(panel, inputs_NI[:, top:])
        for column, outputs in blocks:
            self.products[:, column : column + outputs.shape[1]].addmm_(inputs_NI.T, outputs)

    def gram(self) -> Tensor:
        """Return `X^T X`, both halves of it."""
        upper = self.products[:, : self.num_inputs].triu()
        return upper + upper.triu(1).T

    def cross(self, first: int = 0, num: int | None = None) -> Tensor:
        """Return `X^T Y` of `num` outputs from number `first` on, as a view."""
        start = self.num_inputs + first
        return self.products[:, start : None if num is None else start + num]

    def solver(
        self, affine: bool, ridge: float, relative: bool, dtype: torch.dtype
    ) -> tuple[Solver, bool]:
        """Return `make_solver` of the (centred, ridged) Gram matrix."""
        gram = self.gram()
        penalty = ridge * gram.diagonal().clone() if relative else ridge
        squares = gram.diagonal() + penalty
        if affine:
            mean = self.sums[: self.num_inputs] / self.count
            gram.addr_(mean, mean, alpha=-self.count)
        gram.diagonal().add_(penalty)
        return make_solver(gram, squares, dtype)

    def solve(self, affine: bool = False, ridge: float = 0.0, relative: bool = False) -> AffineMap:
        """Return the map, in float64; the sums stay as they are.

        Args:
            affine: Whether the map has a bias.
            ridge: Penalty on the squared entries of the map.
            relative: Measure the penalty of each input in its own sum of squares.

        Raises:
            UserError: If there are too few rows to determine the map.
        """
        self.flush()
        check_enough(self.count, self.num_inputs, ridge)
        solver, _ = self.solver(affine, ridge, relative, self._dtype)
        if not affine:
            return AffineMap(solver(self.cross()).T)
        mean_x, mean_y = (self.sums / self.count).tensor_split([self.num_inputs])
        weight = solver(self.cross() - self.count * torch.outer(mean_x, mean_y)).T
        return AffineMap(weight, mean_y - weight @ mean_x)


def make_solver(
    gram: Tensor, squares: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Solver, bool]:
    """Return a function that multiplies by the inverse of a Gram matrix.

    The matrix is scaled first by `squares`, because a few dimensions of a language model are a
    thousand times larger than the rest. A pivot of the scaled matrix is then the share of a
    dimension that those before it leave, and what is below rounding is nothing: the rounding of the
    sums, or that of the states if it is coarser.

    Args:
        gram: The matrix, ridge included.
        squares: Sums of squares of the inputs before any centring, ridge included.
        dtype: Number format that the rows had.

    Returns:
        The function, and whether it multiplies by a pseudo-inverse since the inputs lie in a
        subspace.
    """
    finest = torch.finfo(torch.float64).eps
    rounding = finest if dtype == torch.float64 else torch.finfo(torch.float32).eps ** 2
    least = len(gram) * max(finest, rounding)
    scale = torch.where(squares > 0, squares.clamp_min(1e-300).rsqrt(), 0.0)[:, None]
    scaled = gram * scale * scale.T
    factor, info = torch.linalg.cholesky_ex(scaled)
    if int(info) == 0 and float(factor.diagonal().min()) ** 2 > least:
        unscaled = factor.div_(scale)
        return lambda right: torch.cholesky_solve(right, unscaled), False
    values, vectors = torch.linalg.eigh(scaled)
    inverse = torch.where(values > least, 1 / values, 0.0)[:, None]
    return lambda right: scale * (vectors @ (inverse * (vectors.T @ (right * scale)))), True


def check_enough(count: int, width: int, ridge: float) -> None:
    """Refuse a fit that `count` rows do not determine."""
    if ridge < 0:
        raise UserError(f"A ridge of {ridge} is not possible: give 0 or more.")
    if count == 0:
        raise UserError("There is no position to fit maps on: give texts of two tokens or more.")
    if count < width and ridge == 0:
        raise UserError(
            f"{count} positions do not determine maps of width {width}: give at least {width} "
            "positions (ten times as many for maps that hold on other text), or a ridge above 0."
        )


# -- all layers of a model -----------------------------------------------------------------------


class _Run(NamedTuple):
    """Neighbouring layers `first ... first + num - 1` that stand side by side in a product."""

    first: int
    num: int
    column: int


class LayerStatistics:
    """Sums over positions of text for the pairs of layers in a plan.

    Rows are gathered in a buffer of bounded size, where they become float64, and multiplied into
    the sums when it is full: small batches then cost no more than large ones.
    """

    def __init__(
        self, num_layers: int, width: int, plan: Plan, device: torch.device | str = "cpu"
    ) -> None:
        self.num_layers, self.width, self.plan = num_layers, width, dict(plan)
        self.equations = {
            source: NormalEquations(width, len(targets) * width, device)
            for source, targets in plan.items()
        }
        self.sums = torch.zeros(num_layers + 1, width, dtype=torch.float64, device=device)
        self._count = 0
        self._runs = {source: _runs(targets) for source, targets in plan.items()}
        self._buffer: Tensor | None = None
        self._filled = 0

    @property
    def count(self) -> int:
        """Number of positions."""
        return self._count + self._filled

    @property
    def nbytes(self) -> int:
        """Size of the products."""
        return sum(equations.products.nbytes for equations in self.equations.values())

    def update(self, states: Sequence[Tensor]) -> None:
        """Add `n` positions: `L + 1` tensors `[n, d]`, row `r` of each the same position."""
        check_states(states)
        if len(states) != self.num_layers + 1 or states[0].shape[1] != self.width:
            raise UserError(
                f"{len(states)} states of width {states[0].shape[1]} do not fit: these are "
                f"statistics of {self.num_layers + 1} states of width {self.width}."
            )
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
        flat, d = rows.view(self._filled, -1), self.width
        for source, equations in self.equations.items():
            blocks = (
                (run.column * d, flat[:, run.first * d : (run.first + run.num) * d])
                for run in self._runs[source]
            )
            equations.add_products(flat[:, source * d : (source + 1) * d], blocks)
        self._count += self._filled
        self._filled = 0

    def finish(self) -> LayerStatistics:
        """Bring in what is left, give the buffer's memory back, and return these statistics."""
        self.flush()
        self._buffer = None
        for source, equations in self.equations.items():
            equations.sums = self.sums[[source, *self.plan[source]]].flatten()
            equations.count = self._count
        return self

    def gram(self, source: int) -> Tensor:
        """Return `H_i^T H_i`, both halves of it."""
        return self.equations[source].gram()

    def cross(self, source: int, target: int) -> Tensor:
        """Return `H_i^T H_j`, as a view."""
        first = self.plan[source].index(target) * self.width
        return self.equations[source].cross(first, self.width)

    def all_reduce(self) -> None:
        """Sum over all processes, for all of them."""
        self.flush()
        count = torch.tensor(self._count, device=self.sums.device)
        products = [equations.products for equations in self.equations.values()]
        for tensor in (*products, self.sums, count):
            torch.distributed.all_reduce(tensor)
        self._count = int(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all there is, rows still in the buffer too, so that going on gives the same."""
        state = {f"product.{i}": equations.products for i, equations in self.equations.items()}
        state |= {"sums": self.sums, "count": torch.tensor(self._count)}
        if self._buffer is not None and self._filled:
            state["rows"] = self._buffer[: self._filled]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned; ValueError if it is of other pairs or widths."""
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

    def solve(
        self, affine: bool = False, ridge: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> tuple[Maps, Maps, list[int]]:
        """Solve for all maps; one factor of each source's Gram matrix serves all its targets.

        The statistics are used up: maps are solved in their place, and each source's are given back
        when it is done, so that all this needs little more memory than they did.

        Args:
            affine: Whether maps have biases.
            ridge: Penalty on the squared entries of the maps.
            dtype: That of the maps, float64 only if the states were.

        Returns:
            Maps, biases (none if linear), and the sources whose states lie in a subspace.
        """
        self.finish()
        check_enough(self.count, self.width, ridge)
        means = self.sums / self.count
        maps: Maps = {}
        biases: Maps = {}
        dependent = []
        for source, targets in self.plan.items():
            if targets:
                solver, is_dependent = self.equations[source].solver(affine, ridge, False, dtype)
                if is_dependent:
                    dependent.append(source)
            for target in targets:
                block = self.cross(source, target)
                if affine:
                    block.addr_(means[source], means[target], alpha=-self.count)
                solution = solver(block)
                if affine:
                    biases[source, target] = (means[target] - means[source] @ solution).to(dtype)
                # In float64 the map is a view of the statistics themselves.
                maps[source, target] = block.copy_(solution).T.to(dtype)
            del self.equations[source]
        return maps, biases, dependent

    def alignments(self) -> Tensor:
        """Return `||H_i^T H_j||^2` of centred states for the pairs there are, NaN elsewhere."""
        self.flush()
        num, d, count = self.num_layers + 1, self.width, max(1, self.count)
        table = torch.full((num, num), float("nan"), dtype=torch.float64)
        means = self.sums / count
        for source, targets in self.plan.items():
            blocks = {source: self.gram(source)}
            blocks |= {target: self.cross(source, target) for target in targets}
            for target, block in blocks.items():
                total = torch.zeros((), dtype=torch.float64, device=block.device)
                for top in range(0, d, _CKA_PANEL):  # by panels, for the memory of the difference
                    rows = slice(top, top + _CKA_PANEL)
                    centred = torch.addr(
                        block[rows], means[source][rows], means[target], alpha=-count
                    )
                    total += centred.square_().sum()
                table[source, target] = table[target, source] = total.cpu()
        return table

    def _rows(self) -> Tensor:
        if self._buffer is None:
            row_bytes = self.sums.numel() * self.sums.element_size()
            num = int(_BUFFER_SHARE * self.nbytes / row_bytes)
            num = min(max(num, _MIN_ROWS), _MAX_ROWS)
            self._buffer = self.sums.new_empty(num, *self.sums.shape)
        return self._buffer


def cka_table(aligned: Tensor) -> Tensor:
    """Return linear CKA of all pairs from `LayerStatistics.alignments`.

    With centred states, `K = H_i H_i^T` and `M = H_j H_j^T` (Kornblith et al. 2019, 1905.00414),

        CKA = <K, M> / (||K|| ||M||) = ||H_i^T H_j||^2 / (||H_i^T H_i|| ||H_j^T H_j||)

    in Frobenius norms. The left form needs a matrix of positions x positions, the right form only
    what the statistics hold. NaN where a layer's states never vary.
    """
    own = aligned.diagonal().sqrt()
    return aligned / (own[:, None] * own)


# -- how much of a layer a map explains ----------------------------------------------------------


class R2:
    """r^2 of given maps over a stream of states.

    It is the mean over output dimensions `k` of

        1 - sum (h_j[k] - predicted[k])^2 / sum (h_j[k] - mean[k])^2

    as scikit-learn's `r2_score` with its uniform average: a dimension that never varies counts 1 if
    it is predicted exactly and 0 otherwise. Predictions are made in the precision of states and
    maps and summed in float64: with float32 states the table agrees with float64 to 1e-6.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[int, int]],
        find: Callable[[int, int], tuple[Tensor, Tensor | None] | None],
    ) -> None:
        """Start without states; `find` returns a pair's matrix and bias, None for the identity."""
        self.pairs, self.find = list(pairs), find
        self.residuals: dict[tuple[int, int], Tensor] = {}
        self.count = 0

    def update(self, states: Sequence[Tensor]) -> None:
        """Add positions: `L + 1` tensors `[n, d]`."""
        check_states(states)
        for start in range(0, len(states[0]), _WAITING_ROWS):
            self._add([state[start : start + _WAITING_ROWS] for state in states])

    def table(self) -> Tensor:
        """Return `(L + 1, L + 1)` r^2 of all positions so far; NaN where there is no map."""
        variation = self.squares - self.sums.square() / self.count
        # What is left of a constant dimension by rounding is no variation.
        noise = torch.finfo(torch.float64).eps * (self.squares + self.count * self.shift.square())
        varies = variation > noise
        table = torch.full((len(self.sums),) * 2, float("nan"), dtype=torch.float64)
        table.fill_diagonal_(1.0)
        for (i, j), residual in self.residuals.items():
            explained = 1 - residual / torch.where(varies[j], variation[j], 1.0)
            table[i, j] = torch.where(varies[j], explained, (residual == 0).double()).mean()
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
            self.squares[layer] += shifted.square_().sum(0)
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
            residual += left.square_().sum(0, dtype=torch.float64)


# -- what is refused -----------------------------------------------------------------------------


def check_states(states: Sequence[Tensor]) -> None:
    """Refuse what is not `L + 1` tensors `[n, d]` of one shape."""
    if len(states) < 2:
        raise UserError("Give the states of at least two layers, h_0 and h_1.")
    shape = states[0].shape
    for layer, state in enumerate(states):
        if state.ndim != 2 or state.shape != shape:
            raise UserError(
                f"The states of layer {layer} have the shape {tuple(state.shape)}: give one tensor "
                f"[positions, width] for each layer, all like the first, {tuple(shape)}."
            )


def check_finite(states: Sequence[Tensor]) -> None:
    """Refuse NaN and infinity, and name the layer that has them."""
    for layer, state in enumerate(states):
        # A sum is finite if its terms are, short of overflow, and costs a tenth of `isfinite`.
        if not bool(state.sum(dtype=torch.float64).isfinite()):
            what = "NaN" if bool(state.isnan().any()) else "infinite values"
            raise UserError(
                f"The states of layer {layer} hold {what}: run the model in float32, or look at "
                "its weights and inputs."
            )


def _runs(targets: Sequence[int]) -> list[_Run]:
    """Group neighbouring targets; the first block of a product is the source's own."""
    runs = []
    for _, members in groupby(enumerate(targets, 1), key=lambda item: item[1] - item[0]):
        (column, first), *others = members
        runs.append(_Run(first, 1 + len(others), column))
    return runs
