"""Linear CKA between layers (Kornblith et al. 2019, arXiv 1905.00414), from statistics alone.

With centred states, `K = H_i H_i^T` and `M = H_j H_j^T`,

    CKA = <K, M> / (||K|| ||M||) = ||H_i^T H_j||^2 / (||H_i^T H_i|| ||H_j^T H_j||)

in Frobenius norms. The left form needs a matrix of positions x positions, the right form only what
the statistics hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepenough.shortcut.statistics import Statistics

_PANEL = 64


def alignments(statistics: Statistics) -> Tensor:
    """`||H_i^T H_j||^2` of centred states for the pairs of the statistics, NaN elsewhere."""
    statistics.flush()
    num, d, count = statistics.num_layers + 1, statistics.width, max(1, statistics.count)
    table = torch.full((num, num), float("nan"), dtype=torch.float64)
    means = statistics.sums / count
    for source, targets in statistics.plan.items():
        blocks = {source: statistics.gram(source)}
        blocks |= {target: statistics.cross(source, target) for target in targets}
        for target, block in blocks.items():
            total = torch.zeros((), dtype=torch.float64, device=block.device)
            for top in range(0, d, _PANEL):  # a panel at a time, for the memory of the difference
                rows = slice(top, top + _PANEL)
                total += (
                    torch.addr(block[rows], means[source][rows], means[target], alpha=-count)
                    .square_()
                    .sum()
                )
            table[source, target] = table[target, source] = total.cpu()
    return table


def cka_table(aligned: Tensor) -> Tensor:
    """CKA of all pairs, NaN where a layer's states never vary."""
    own = aligned.diagonal().sqrt()
    return aligned / (own[:, None] * own)


def cka_ref(first: Tensor, second: Tensor) -> Tensor:
    """From the two Gram matrices of positions."""
    first, second = first - first.mean(0), second - second.mean(0)
    gram_i, gram_j = first @ first.T, second @ second.T
    return (gram_i * gram_j).sum() / (gram_i.norm() * gram_j.norm())
