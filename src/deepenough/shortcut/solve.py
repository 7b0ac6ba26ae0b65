"""From statistics to maps: one Cholesky factor for each source layer, shared by all its targets.

The map `A_ij = argmin sum ||h_j - A h_i||^2 + ridge ||A||^2` ("Jump to Conclusions", arXiv
2303.09435, equation 1, which has no ridge) solves the normal equations

    (H_i^T H_i + ridge I) A_ij^T = H_i^T H_j

and the affine map solves them for centred states, with the bias `mean_j - A_ij mean_i`.

States may lie in a subspace: what a layer norm without a bias returns sums to zero over its entries
and so the Gram matrix is singular but for rounding, as all maps that agree on the subspace fit
equally well; one of least norm is taken, from the eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut.statistics import Statistics

Maps = dict[tuple[int, int], Tensor]
Solver = Callable[[Tensor], Tensor]


def solve(
    statistics: Statistics,
    affine: bool = False,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Maps, Maps, list[int]]:
    """Maps, biases (none if linear) and the sources whose states lie in a subspace.

    `dtype` is that of the maps, float64 only if the states were.

    The statistics are used up: maps are solved in their place, and each source's are given back
    when it is done, so that all this needs little more memory than they did.
    """
    statistics.finish()
    check_enough(statistics.count, statistics.width, ridge)
    means, squares = statistics.sums / statistics.count, statistics.squares
    maps: Maps = {}
    biases: Maps = {}
    dependent = []
    for source in list(statistics.plan):
        targets = statistics.plan[source]
        if targets:
            gram = statistics.gram(source)
            if affine:
                gram.addr_(means[source], means[source], alpha=-statistics.count)
            gram.diagonal().add_(ridge)
            solver, is_dependent = make_solver(gram, squares[source] + ridge, dtype)
            if is_dependent:
                dependent.append(source)
        for target in targets:
            block = statistics.cross(source, target)
            if affine:
                block.addr_(means[source], means[target], alpha=-statistics.count)
            solution = solver(block)
            if affine:
                bias = means[target] - means[source] @ solution
                biases[source, target] = bias.to(dtype)
            # In float64 the map is a view of the statistics themselves.
            maps[source, target] = block.copy_(solution).T.to(dtype)
        del statistics.products[source]
    return maps, biases, dependent


def make_solver(
    gram: Tensor, squares: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Solver, bool]:
    """What multiplies by the inverse of a Gram matrix, and whether that is only a pseudo-inverse.

    The matrix is scaled first by `squares`, the sums of squares before any centring, because a few
    dimensions of a language model are a thousand times larger than the rest. A pivot of the scaled
    matrix is then the share of a dimension that those before it leave, and what is below rounding
    is nothing: the rounding of the sums, or that of the states if it is coarser.
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
    """Refuse a fit that is not determined."""
    if ridge < 0:
        raise UserError(f"A ridge of {ridge} is not possible: give 0 or more.")
    if count == 0:
        raise UserError("There is no position to fit maps on: give texts of two tokens or more.")
    if count < width and ridge == 0:
        raise UserError(
            f"{count} positions do not determine maps of width {width}: give at least {width} "
            "positions (ten times as many for maps that hold on other text), or a ridge above 0."
        )


def solve_ref(source: Tensor, target: Tensor, affine: bool = False) -> tuple[Tensor, Tensor | None]:
    """One map straight from its definition, by least squares on the states themselves."""
    if not affine:
        return torch.linalg.lstsq(source, target).solution.T, None
    mean_i, mean_j = source.mean(0), target.mean(0)
    matrix = torch.linalg.lstsq(source - mean_i, target - mean_j, driver="gelsd").solution.T
    return matrix, mean_j - matrix @ mean_i
