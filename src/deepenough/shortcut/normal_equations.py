"""The accumulator that every least-squares fit of this package uses, and the maps that it gives.

Maps between layers, linear stand-ins for the parts of a block, and the linear drafter of `decoding`
are fitted so. Of rows `x` (inputs) and `y` (outputs) `NormalEquations` keeps the sums

    products = X^T [X Y]        [inputs, inputs + outputs]

in float64, from which the map `argmin_A sum ||y - A x||^2 + ridge ||A||^2` follows ("Jump to
Conclusions", arXiv 2303.09435, equation 1, which has no ridge):

    (X^T X + ridge I) A^T = X^T Y

An affine map solves the same equations for centred rows and has the bias `mean_y - A mean_x`.
Nothing is kept per row, and sums of different texts or processes add.

Rows may lie in a subspace: what a layer norm without a bias returns sums to zero over its entries,
and so `X^T X` is singular but for rounding. All maps that agree on the subspace fit equally well,
and the one of least norm is taken, as by `numpy.linalg.lstsq`. Because `X^T X` squares what it is
made of, sums in float64 tell singular values of `X` apart down to about 1e-8 of the largest, where
`lstsq` on the rows themselves has 1e-16.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.devices import exact, sums_device
from deepenough.errors import UserError
from deepenough.hf.intercept import OneDnnProducts

WAITING_ROWS = 512
"""Rows of `NormalEquations` that wait until a product costs more than fetching its result; of
those in float32 four times as many, since they are multiplied faster."""
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
        folder: Path | None = None,
    ) -> None:
        """Start from nothing.

        With `in_single`, products of a few hundred rows are made in float32 before they are added,
        three times as fast and good enough for maps with a ridge. With a `folder`, the products are
        in a file there, of which memory holds what there is room for.
        """
        self.in_single = in_single
        zeros = partial(torch.zeros, dtype=torch.float64, device=sums_device(torch.device(device)))
        self.num_inputs = num_inputs
        shape = num_inputs, num_inputs + num_outputs
        self.products = zeros(*shape) if folder is None else zeros_in_file(folder, *shape)
        self.sums = zeros(num_inputs + num_outputs)
        self.count = 0
        self._waiting: list[Tensor] = []

    def update(self, inputs_NI: Tensor, outputs_NO: Tensor) -> None:
        """Add rows: inputs `[N, num_inputs]` and outputs `[N, num_outputs]`."""
        self._waiting.append(torch.cat((inputs_NI, outputs_NO), dim=-1))
        if sum(map(len, self._waiting)) >= WAITING_ROWS * (4 if self.in_single else 1):
            self.flush()

    def flush(self) -> None:
        """Bring the rows that wait into the sums."""
        if self._waiting:
            rows = torch.cat(self._waiting)
            self._waiting.clear()
            if self.in_single:
                turned = rows.float().T.contiguous()
                with torch.no_grad(), OneDnnProducts():
                    products = F.linear(turned[: self.num_inputs], turned)
                self.products += products.to(self.products.device)
                self.sums += rows.to(self.sums.device).sum(0, dtype=torch.float64)
                self.count += len(rows)
                return
            rows = exact(rows).to(self.products.device)
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

    def gram(self, centred: bool) -> Tensor:
        """Return all of `X^T X`; of rows less their means if `centred`."""
        upper = self.products[:, : self.num_inputs].triu()
        gram = upper + upper.triu(1).T
        if centred:
            mean_x, _ = self.means()
            gram.addr_(mean_x, mean_x, alpha=-self.count)
        return gram

    def moments(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return `gram` and `cross` of all outputs."""
        return self.gram(centred), self.cross(slice(None), centred)

    def cross(self, outputs: slice, centred: bool) -> Tensor:
        """Return `X^T Y` of some outputs; of rows less their means if `centred`."""
        cross = self.products[:, self.num_inputs :][:, outputs]
        if not centred:
            return cross
        mean_x, mean_y = self.means()
        return torch.addr(cross, mean_x, mean_y[outputs], alpha=-self.count)

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
        num_outputs = self.products.shape[1] - self.num_inputs
        return next(self.solve_parts(num_outputs, affine, ridge, relative, dtype))

    def solve_parts(
        self, size: int, affine: bool, ridge: float, relative: bool, dtype: torch.dtype
    ) -> Iterator[AffineMap]:
        """Yield what `solve` returns in maps to so many outputs, with one factor for all of them.

        No more than one of them is in memory.
        """
        self.flush()
        check_enough(self.count, self.num_inputs, ridge)
        gram = self.gram(centred=affine)
        squares = self.products.diagonal()
        penalty = ridge * squares if relative else torch.full_like(squares, ridge)
        gram.diagonal().add_(penalty)
        solve, is_dependent = _factor(gram, squares + penalty, dtype)
        mean_x, mean_y = self.means()
        for first in range(0, len(mean_y), size):
            outputs = slice(first, first + size)
            weight = solve(self.cross(outputs, affine)).T
            bias = mean_y[outputs] - weight @ mean_x if affine else None
            yield AffineMap(weight, bias, is_dependent)


def zeros_in_file(folder: Path, *shape: int) -> Tensor:
    """Return zeros in float64 in a file of a folder, which goes with the process that has them."""
    size = math.prod(shape)
    handle, name = tempfile.mkstemp(prefix="sums-", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):  # else a full disk would end the process while it adds
            os.posix_fallocate(handle, 0, size * torch.float64.itemsize)
        return torch.from_file(name, shared=True, size=size, dtype=torch.float64).view(shape)
    finally:
        os.close(handle)
        os.unlink(name)


def _factor(
    gram: Tensor, squares: Tensor, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """Return what multiplies by the inverse, or the pseudo-inverse, of a Gram matrix.

    The matrix is scaled first by `squares`, because a few dimensions of a language model are a
    thousand times larger than the rest. An eigenvalue of the scaled matrix that is below rounding
    is nothing: the rounding of the sums, or that of the states if it is coarser. To round to a
    format of precision `eps` adds an error of variance `eps^2 / 24` to numbers of mean square 1; of
    half precision, what is below three times that is nothing. The smallest eigenvalue is at least
    one over the trace of the inverse, which is quicker to have than the eigenvalues.

    The ridge is included in `gram`, and in `squares`, sums before any centring; the rows had the
    format `dtype`. With it comes whether the inputs lie in a subspace, so that it multiplies by a
    pseudo-inverse.
    """
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    least = len(gram) * (eps if dtype == torch.float64 else single**2)
    if eps > single:
        least = max(least, eps**2 / 8)
    scale = torch.where(squares > 0, squares.clamp_min(1e-300).rsqrt(), 1.0)[:, None]
    scaled = gram * scale * scale.T
    factor, info = torch.linalg.cholesky_ex(scaled)
    if int(info) == 0 and float(torch.cholesky_inverse(factor).trace()) < 1 / least:
        factor.div_(scale)
        return lambda right: torch.cholesky_solve(right, factor), False
    values, vectors = torch.linalg.eigh(scaled)
    empty = int((values <= least).sum())  # they come in ascending order
    kept, sizes = vectors[:, empty:], values[empty:, None]
    nothing, _ = torch.linalg.qr(scale * vectors[:, :empty])

    def solve(right: Tensor) -> Tensor:
        solution = scale * (kept @ ((kept.T @ (right * scale)) / sizes))
        # Of least norm before the scaling: without a share in what no input reaches.
        return solution - nothing @ (nothing.T @ solution)

    return solve, empty > 0


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
