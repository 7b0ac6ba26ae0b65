"""Early exit over a sweep of thresholds, from confidences that were computed once.

A token leaves at the first layer `l` whose prediction has a gap between its two largest
probabilities of more than (Confident Adaptive Language Modeling, arXiv 2207.07061)

    0.9 * lambda + 0.1 * exp(-4 * t / N)

with `t` the token's position and `N` the mean length of the texts; at the last layer it leaves in
any case. Layer 0 is the embeddings, so what leaves at layer `l` of `L` has run `l` layers and saved
the share `1 - l / L`. A token agrees if what is predicted where it leaves is the last layer's top
token. The gaps do not depend on `lambda`, so one pass of the model serves the whole sweep.

Leaving always at one and the same layer is the baseline: what does watching each token add?

Shapes: L+1 layers, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: From leaving almost at once to never. CALM's end at 1, a gap of 0.9, which high agreements are
#: beyond: ten finer steps lead to 10/9, a gap of 1.
LAMBDAS: tuple[float, ...] = (
    *(round(step / 24, 4) for step in range(25)),
    *(round(1 + step / 90, 4) for step in range(1, 10)),
    10 / 9,
)
#: Agreements with the last layer at which the layers saved are reported.
AGREEMENTS: tuple[float, ...] = (0.90, 0.95, 0.99)


@dataclass(frozen=True)
class ExitPoint:
    """What one threshold (or one fixed layer, without `lambda_`) gives."""

    lambda_: float | None
    layers_mean: float
    saved: float
    agreement: float


@dataclass(frozen=True)
class Saved:
    """Most layers saved at an agreement, with the threshold, and with one layer for all tokens."""

    agreement: float
    saved: float
    lambda_: float | None
    fixed_layer_saved: float


def thresholds(lambda_: float, position_N: Tensor, mean_length: float) -> Tensor:
    """The gap to exceed, `0.9 * lambda + 0.1 * exp(-4 * t / N)`, for every position."""
    return 0.9 * lambda_ + 0.1 * torch.exp(-4.0 * position_N.double() / mean_length)


def sweep(
    gap_LN: Tensor,
    agrees_LN: Tensor,
    position_N: Tensor,
    mean_length: float,
    lambdas: Sequence[float] = LAMBDAS,
) -> list[ExitPoint]:
    """One point per threshold; `gap_LN` and `agrees_LN` have a row for every layer 0 ... L."""
    points = []
    for lambda_ in lambdas:
        leaves_LN = gap_LN > thresholds(lambda_, position_N, mean_length)
        leaves_LN[-1] = True
        # The first layer that lets go: `argmax` of a 0/1 table gives the first 1.
        layer_N = leaves_LN.to(torch.uint8).argmax(0)
        points.append(_point(lambda_, layer_N, agrees_LN))
    return points


def sweep_ref(
    gap_LN: Tensor,
    agrees_LN: Tensor,
    position_N: Tensor,
    mean_length: float,
    lambdas: Sequence[float] = LAMBDAS,
) -> list[ExitPoint]:
    """The rule as it is written, token by token and layer by layer."""
    num_layers, num_tokens = len(gap_LN) - 1, gap_LN.shape[1]
    points = []
    for lambda_ in lambdas:
        layers, agreeing = 0, 0
        for token in range(num_tokens):
            t = position_N[token].item()
            layer = 0
            while layer < num_layers and not (
                gap_LN[layer, token].item() > 0.9 * lambda_ + 0.1 * math.exp(-4.0 * t / mean_length)
            ):
                layer += 1
            layers += layer
            agreeing += bool(agrees_LN[layer, token])
        mean = layers / num_tokens
        points.append(ExitPoint(lambda_, mean, 1 - mean / num_layers, agreeing / num_tokens))
    return points


def fixed_exits(agrees_LN: Tensor) -> list[ExitPoint]:
    """Every token leaves at layer 0, or 1, ... or `L`."""
    num_tokens = agrees_LN.shape[1]
    return [
        _point(None, torch.full((num_tokens,), layer), agrees_LN) for layer in range(len(agrees_LN))
    ]


def layers_saved(
    points: Sequence[ExitPoint],
    fixed: Sequence[ExitPoint],
    agreements: Sequence[float] = AGREEMENTS,
) -> list[Saved]:
    """At each agreement, the most that a swept threshold and a fixed layer save.

    Where no threshold agrees often enough, nothing is saved: all layers are run.
    """
    rows = []
    for agreement in agreements:
        best = _most_saving(points, agreement)
        rows.append(
            Saved(
                agreement,
                best.saved if best else 0.0,
                best.lambda_ if best else None,
                chosen.saved if (chosen := _most_saving(fixed, agreement)) else 0.0,
            )
        )
    return rows


def _most_saving(points: Sequence[ExitPoint], agreement: float) -> ExitPoint | None:
    enough = [point for point in points if point.agreement >= agreement]
    return max(enough, key=lambda point: point.saved, default=None)


def _point(lambda_: float | None, layer_N: Tensor, agrees_LN: Tensor) -> ExitPoint:
    num_layers = len(agrees_LN) - 1
    mean = layer_N.sum().item() / layer_N.numel()
    agreeing = agrees_LN.gather(0, layer_N[None]).sum().item()
    return ExitPoint(lambda_, mean, 1 - mean / num_layers, agreeing / layer_N.numel())
