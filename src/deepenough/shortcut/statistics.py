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
and so `X^T X` is singular but for rounding. All maps that agree on the subspace fit equally well,
and the one of least norm is taken, as by `numpy.linalg.lstsq`. Because `X^T X` squares what it is
made of, sums in float64 tell singular values of `X` apart down to about 1e-8 of the largest, where
`lstsq` on the rows themselves has 1e-16.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.errors import UserError
from deepenough.hf.intercept import OneDnnProducts

logger = logging.getLogger("deepenough")

Targets = Literal["all", "last"]
Maps = dict[tuple[int, int], Tensor]

_WAITING_ROWS = 512
"""Rows of `NormalEquations` that wait until a product costs more than fetching its result; of
those in float32 four times as many, since they are multiplied faster."""
_BUFFER_SHARE = 0.15
"""Size of the buffer of `LayerStatistics` as a share of the statistics."""
_MIN_ROWS, _MAX_ROWS = 32, 384
_PANEL = 384


@dataclass(frozen=True)
class AffineMap:
    """`y = weight x + bias`."""

    weight: Tensor
    bias: Tensor | None = None
    is_dependent: bool = False
    """Whether the inputs lay in a subspace; of many best maps this is then that of least norm."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Apply the map to rows `[..., inputs]`."""
        return F.linear(hidden, self.weight, self.bias)


class NormalEquations:
    """Sums `X^T X` and `X^T Y` over rows, in float64, and the map that they determine.

    Use: `update(x, y)` with batches of rows of any size, then `solve(...)`.

    `X^T X` is symmetric, so it is computed in panels that begin at their own diagonal; below it the
    block stays zero (`moments` returns both halves).

    Attributes:
        num_inputs: Width of `x`.
        products: `X^T [X Y]`, `[num_inputs, num_inputs + num_outputs]`.
        sums: Sums of `[x y]`.
        count: Number of rows in the sums; those that still wait are not counted.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        device: torch.device | str = "cpu",
        in_single: bool = False,
    ) -> None:
        """Start from nothing.

        With `in_single`, products of a few hundred rows are made in float32 before they are added,
        three times as fast and good enough for maps with a ridge.
        """
        self.in_single = in_single
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.num_inputs = num_inputs
        self.products = zeros(num_inputs, num_inputs + num_outputs)
        self.sums = zeros(num_inputs + num_outputs)
        self.count = 0
        self._waiting: list[Tensor] = []

    def update(self, inputs_NI: Tensor, outputs_NO: Tensor) -> None:
        """Add rows: inputs `[N, num_inputs]` and outputs `[N, num_outputs]`."""
        self._waiting.append(torch.cat((inputs_NI, outputs_NO), dim=-1))
        if sum(map(len, self._waiting)) >= _WAITING_ROWS * (4 if self.in_single else 1):
            self.flush()

    def flush(self) -> None:
        """Bring the rows that wait into the sums."""
        if self._waiting:
            rows = torch.cat(self._waiting)
            self._waiting.clear()
            if self.in_single:
                turned = rows.float().T.contiguous()
                with torch.no_grad(), OneDnnProducts():
                    self.products += F.linear(turned[: self.num_inputs], turned)
                self.sums += rows.sum(0, dtype=torch.float64)
                self.count += len(rows)
                return
            rows = rows.double()
            self.add(rows[:, : self.num_inputs], rows[:, self.num_inputs :])

    def add(self, inputs_NI: Tensor, outputs_NO: Tensor) -> None:
        """Add rows of float64 at once, before those that wait."""
        num = self.num_inputs
        for top in range(0, num, _PANEL):
            panel = inputs_NI[:, top : top + _PANEL].T
            self.products[top : top + _PANEL, top:num].addmm_(panel, inputs_NI[:, top:])
        self.products[:, num:].addmm_(inputs_NI.T, outputs_NO)
        self.sums[:num] += inputs_NI.sum(0)
        self.sums[num:] += outputs_NO.sum(0)
        self.count += len(inputs_NI)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of `x` and `y`."""
        mean_x, mean_y = (self.sums / max(1, self.count)).tensor_split([self.num_inputs])
        return mean_x, mean_y

    def moments(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return all of `X^T X` and a view of `X^T Y`; of rows less their means if `centred`."""
        upper = self.products[:, : self.num_inputs].triu()
        gram, cross = upper + upper.triu(1).T, self.products[:, self.num_inputs :]
        if not centred:
            return gram, cross
        mean_x, mean_y = self.means()
        gram.addr_(mean_x, mean_x, alpha=-self.count)
        return gram, torch.addr(cross, mean_x, mean_y, alpha=-self.count)

    def excess_error(self, found: AffineMap) -> float:
        """Return how much the squared error of a map exceeds that of predicting zeros.

        It is `sum ||y - A x - b||^2 - sum ||y||^2` of these rows, below 0 for a map of use.
        """
        self.flush()
        gram, cross = self.moments(centred=False)
        weight = found.weight.to(gram)
        error = ((weight @ gram) * weight).sum() - 2 * (weight.T * cross).sum()
        if found.bias is not None:
            bias = found.bias.to(gram)
            sum_x, sum_y = self.sums.tensor_split([self.num_inputs])
            error += 2 * bias @ (weight @ sum_x - sum_y) + self.count * bias @ bias
        return float(error)

    def solve(
        self,
        affine: bool = False,
        ridge: float = 0.0,
        relative: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> AffineMap:
        """Return the map, in float64; the sums stay as they are.

        The ridge is a penalty on the squared entries of the map; a `relative` one is measured, for
        each input, in its own sum of squares. `dtype` is the number format that the rows had.
        """
        self.flush()
        check_enough(self.count, self.num_inputs, ridge)
        gram, cross = self.moments(centred=affine)
        squares = self.products.diagonal()
        penalty = ridge * squares if relative else torch.full_like(squares, ridge)
        gram.diagonal().add_(penalty)
        solution, is_dependent = _solve(gram, squares + penalty, cross, dtype)
        weight = solution.T
        if not affine:
            return AffineMap(weight, None, is_dependent)
        mean_x, mean_y = self.means()
        return AffineMap(weight, mean_y - weight @ mean_x, is_dependent)


def _solve(gram: Tensor, squares: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Multiply `right` by the inverse, or the pseudo-inverse, of a Gram matrix.

    The matrix is scaled first by `squares`, because a few dimensions of a language model are a
    thousand times larger than the rest. An eigenvalue of the scaled matrix that is below rounding
    is nothing: the rounding of the sums, or that of the states if it is coarser. To round to a
    format of precision `eps` adds an error of variance `eps^2 / 24` to numbers of mean square 1; of
    half precision, what is below three times that is nothing. The smallest eigenvalue is at least
    one over the trace of the inverse, which is quicker to have than the eigenvalues.

    The ridge is included in `gram`, and in `squares`, sums before any centring; the rows had the
    format `dtype`. With the product comes whether the inputs lie in a subspace, so that it is that
    of a pseudo-inverse.
    """
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    least = len(gram) * (eps if dtype == torch.float64 else single**2)
    if eps > single:
        least = max(least, eps**2 / 8)
    scale = torch.where(squares > 0, squares.clamp_min(1e-300).rsqrt(), 1.0)[:, None]
    scaled = gram * scale * scale.T
    factor, info = torch.linalg.cholesky_ex(scaled)
    if int(info) == 0 and float(torch.cholesky_inverse(factor).trace()) < 1 / least:
        return torch.cholesky_solve(right, factor.div_(scale)), False
    values, vectors = torch.linalg.eigh(scaled)
    empty = int((values <= least).sum())  # they come in ascending order
    kept = vectors[:, empty:]
    solution = scale * (kept @ ((kept.T @ (right * scale)) / values[empty:, None]))
    # Of least norm before the scaling: without a share in what no input reaches.
    nothing, _ = torch.linalg.qr(scale * vectors[:, :empty])
    return solution - nothing @ (nothing.T @ solution), empty > 0


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


def layer_targets(num_layers: int, targets: Targets = "all") -> dict[int, range]:
    """Return the target layers of every source of a model of `num_layers` layers (one state more).

    The last layer has none, but its Gram matrix is needed to compare it with the others.
    """
    if num_layers < 1:
        raise UserError("Shortcuts need the states of at least two layers, h_0 and h_1.")
    if targets not in ("all", "last"):
        raise UserError(f"The targets {targets!r} are not known: choose 'all' or 'last'.")
    last = num_layers
    return {
        source: range(source + 1 if targets == "all" else max(source + 1, last), last + 1)
        for source in range(last + 1)
    }


def layer_pairs(num_layers: int, targets: Targets = "all") -> set[tuple[int, int]]:
    """Return the pairs `(source, target)` of layers that have a map."""
    every = layer_targets(num_layers, targets)
    return {(source, target) for source, own in every.items() for target in own}


def statistics_bytes(num_layers: int, width: int, targets: Targets = "all") -> int:
    """Return the size of the products of `LayerStatistics`."""
    every = layer_targets(num_layers, targets).values()
    return sum(1 + len(own) for own in every) * width * width * torch.float64.itemsize


class LayerStatistics:
    """Sums over positions of text for all layers of a model and their targets.

    Rows are gathered in a buffer of bounded size, where they become float64, and multiplied into
    the sums when it is full: small batches then cost no more than large ones.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        targets: Targets = "all",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers, self.width, self.targets = num_layers, width, targets
        self.target_layers = layer_targets(num_layers, targets)
        self.equations = {
            source: NormalEquations(width, len(own) * width, device)
            for source, own in self.target_layers.items()
        }
        row_bytes = (num_layers + 1) * width * torch.float64.itemsize
        num_rows = int(_BUFFER_SHARE * statistics_bytes(num_layers, width, targets) / row_bytes)
        num_rows = min(max(num_rows, _MIN_ROWS), _MAX_ROWS)
        shape = (num_rows, num_layers + 1, width)
        self._buffer = torch.empty(shape, dtype=torch.float64, device=device)
        self._filled = 0

    @property
    def count(self) -> int:
        """Number of positions."""
        return self.equations[self.num_layers].count + self._filled

    def update(self, states: Sequence[Tensor]) -> None:
        """Add `n` positions: `L + 1` tensors `[n, d]`, row `r` of each the same position."""
        check_states(states)
        if len(states) != self.num_layers + 1 or states[0].shape[1] != self.width:
            raise UserError(
                f"{len(states)} states of width {states[0].shape[1]} do not fit: these are "
                f"statistics of {self.num_layers + 1} states of width {self.width}."
            )
        num, start = len(states[0]), 0
        while start < num:
            taken = min(num - start, len(self._buffer) - self._filled)
            rows = self._buffer[self._filled : self._filled + taken]
            for layer, state in enumerate(states):
                rows[:, layer].copy_(state[start : start + taken])
            self._filled += taken
            start += taken
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Bring the rows of the buffer into the sums."""
        rows = self._buffer[: self._filled]
        for source, targets in self.target_layers.items():
            self.equations[source].add(rows[:, source], rows[:, targets.start :].flatten(1))
        self._filled = 0

    def all_reduce(self) -> None:
        """Sum over all processes, for all of them."""
        self.flush()
        count = torch.tensor(self.count, device=self._buffer.device)
        torch.distributed.all_reduce(count)
        for equations in self.equations.values():
            torch.distributed.all_reduce(equations.products)
            torch.distributed.all_reduce(equations.sums)
            equations.count = int(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all there is, rows still in the buffer too, so that going on gives the same."""
        count = self.equations[self.num_layers].count
        state = {"count": torch.tensor(count), "rows": self._buffer[: self._filled]}
        for source, equations in self.equations.items():
            state |= {f"products.{source}": equations.products, f"sums.{source}": equations.sums}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned; ValueError if it is of other pairs or widths."""
        self._filled = len(state["rows"])
        for name, tensor in self.state_dict().items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"{name} is missing or of another shape")
            tensor.copy_(state[name])
        for equations in self.equations.values():
            equations.count = int(state["count"])

    def solve(
        self, affine: bool = False, ridge: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> tuple[Maps, Maps, list[int]]:
        """Solve for all maps; one factor of each source's Gram matrix serves all its targets.

        The statistics are used up: each source's are given back when it is done, so that all this
        needs little more memory than they did. Returned are maps, biases (none if linear), and the
        sources whose states lie in a subspace; maps have the dtype of the states, or float32.
        """
        self.flush()
        del self._buffer
        maps: Maps = {}
        biases: Maps = {}
        dependent = []
        own = torch.promote_types(dtype, torch.float32)
        for source, targets in self.target_layers.items():
            equations = self.equations.pop(source)
            if not targets:
                continue
            solved = equations.solve(affine, ridge, dtype=dtype)
            if solved.is_dependent:
                dependent.append(source)
            for target, matrix in zip(targets, solved.weight.split(self.width), strict=True):
                maps[source, target] = matrix.to(own)
            if solved.bias is not None:
                for target, bias in zip(targets, solved.bias.split(self.width), strict=True):
                    biases[source, target] = bias.to(own)
        if dependent:
            logger.warning(
                "The states of layers %s lie in a subspace, as behind a norm without a bias: of "
                "the maps that fit equally well, the smallest were taken.",
                ", ".join(map(str, dependent)),
            )
        return maps, biases, dependent

    def cka(self) -> Tensor:
        """Return the table `[L + 1, L + 1]` of linear CKA; NaN for pairs that are not summed.

        With centred states, `K = H_i H_i^T` and `M = H_j H_j^T` (Kornblith et al., 1905.00414),

            CKA = <K, M> / (||K|| ||M||) = ||H_i^T H_j||^2 / (||H_i^T H_i|| ||H_j^T H_j||)

        in Frobenius norms. The left form needs a matrix of positions x positions, the right form
        only what the statistics hold. NaN also where a layer's states never vary.
        """
        self.flush()
        aligned = torch.full((self.num_layers + 1,) * 2, float("nan"), dtype=torch.float64)
        for source, targets in self.target_layers.items():
            gram, cross = self.equations[source].moments(centred=True)
            aligned[source, source] = gram.square().sum()
            for target, block in zip(targets, cross.split(self.width, dim=1), strict=False):
                aligned[source, target] = aligned[target, source] = block.square().sum()
        own = aligned.diagonal().sqrt()
        return aligned / (own[:, None] * own)


class R2:
    """r^2 of given maps over a stream of states.

    It is the mean over output dimensions `k` of

        1 - sum (h_j[k] - predicted[k])^2 / sum (h_j[k] - mean[k])^2

    as scikit-learn's `r2_score` with its uniform average: a dimension that never varies counts 1 if
    it is predicted exactly and 0 otherwise. Float32 states are predicted in float32, all others in
    float64, where all sums are made: the tables of both agree to 1e-6.
    """

    def __init__(
        self, pairs: Iterable[tuple[int, int]], predict: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Start without states; `predict(hidden, i, j)` takes states of layer `i` to layer `j`."""
        self.pairs, self.predict = list(pairs), predict
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
        rows = states if states[0].dtype == torch.float32 else exact
        for (i, j), residual in self.residuals.items():
            left = rows[j] - self.predict(rows[i], i, j)
            residual += left.square_().sum(0, dtype=torch.float64)


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
