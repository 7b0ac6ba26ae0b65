"""From statistics to maps: one Cholesky factor for each source layer, shared by all its targets.

The map `A_ij = argmin sum ||h_j - A h_i||^2 + ridge ||A||^2` ("Jump to Conclusions", arXiv
2303.09435, equation 1, which has no ridge) solves the normal equations

    (H_i^T H_i + ridge I) A_ij^T = H_i^T H_j

and the affine map solves them for centred states, with the bias `mean_j - A_ij mean_i`.

States may lie in a subspace: a layer norm without a bias leaves a vector whose entries sum to zero.
The Gram matrix is then singular, as all maps that agree on the subspace fit equally well, and the
one of least norm is taken, from the eigenvalues, as a least-squares solver does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepenough.adaptive.shortcut.statistics import Statistics
from deepenough.errors import UserError

Maps = dict[tuple[int, int], Tensor]
Solver = Callable[[Tensor], Tensor]

_DEPENDENT = 1e-13
"""A dimension of which the others leave less than this share is known from them: it is below the
rounding of float32 states, and at the limit of what a float64 Gram matrix can tell."""


def solve(
    statistics: Statistics,
    affine: bool = False,
    ridge: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Maps, Maps, list[int]]:
    """Maps, biases (none if linear) and the sources whose states lie in a subspace.

    The statistics are used up: maps are solved in their place, and each source's are given back
    when it is done, so that all this needs little more memory than they did.
    """
    statistics.finish()
    check_enough(statistics.count, statistics.width, ridge)
    means = statistics.sums / statistics.count
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
            solver, is_dependent = make_solver(gram)
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


def make_solver(gram: Tensor) -> tuple[Solver, bool]:
    """What multiplies by the inverse of a Gram matrix, and whether that is only a pseudo-inverse.

    The matrix is scaled to a unit diagonal before it is factored, because a few dimensions of a
    language model are a thousand times larger than the rest.
    """
    scale = gram.diagonal().clamp_min(0).rsqrt()
    if bool(scale.isfinite().all()):
        factor, info = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
        # The square of a pivot is the share of a dimension that those before it leave.
        if int(info) == 0 and float(factor.diagonal().min()) ** 2 > _DEPENDENT:
            column = scale[:, None]
            return lambda right: torch.cholesky_solve(right * column, factor).mul_(column), False
    values, vectors = torch.linalg.eigh(gram)
    cut = values[-1].clamp_min(0) * len(gram) * torch.finfo(gram.dtype).eps
    inverse = torch.where(values > cut, 1 / values, 0.0)
    return lambda right: vectors @ (inverse[:, None] * (vectors.T @ right)), True


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
