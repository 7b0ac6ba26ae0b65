"""Floating-point operations of each part, multiply-adds counted as two, matrix products only.

These are the counts of torch's own `FlopCounterMode` in closed form (a test holds them equal), so a
trace costs nothing to write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepenough.adaptive.par.config import ParConfig
from deepenough.adaptive.par.pattern import ATTENTION, DENSE, IDENTITY, OPEN


def branch_flops(
    config: ParConfig, branch: str, lanes: int, new: int, keys: int, projected: int | None = None
) -> int:
    """One forward pass of a block over `lanes` x `new` tokens that look at `keys` positions.

    `projected` counts the positions whose keys and values are computed: all of them with memory
    (the default), the new ones alone with a cache.
    """
    d = config.d_model
    if branch == IDENTITY:
        return 0
    if branch == DENSE:
        return 2 * lanes * new * 2 * d * config.d_ff
    if branch == OPEN:
        sizes = (config, lanes, new, keys, projected)
        return sum(branch_flops(sizes[0], kind, *sizes[1:]) for kind in (ATTENTION, DENSE))
    projected = keys if projected is None else projected
    maps = 2 * lanes * (new * 2 * d * d + projected * 2 * d * d)
    positions = 2 * (keys + 1) * d * d + 2 * lanes * new * (keys + 1) * d
    attention = 2 * lanes * new * keys * 2 * d
    return maps + positions + attention


def head_flops(config: ParConfig, targets: Tensor | None, num_tokens: int) -> Tensor:
    """Of the output layer, one number a token; with targets only the clusters they fall into."""
    d, vocab_size = config.d_model, config.vocab_size
    if not config.cutoffs:
        return torch.full((num_tokens,), 2.0 * d * vocab_size)
    bounds = [*config.cutoffs, vocab_size]
    cost = torch.full((num_tokens,), 2.0 * d * (config.cutoffs[0] + len(config.cutoffs)))
    for cluster, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        inner = int(d // config.div_value ** (cluster + 1))
        tail = 2.0 * inner * (d + high - low)
        if targets is None:
            cost += tail
        else:
            flat = targets.flatten().cpu()
            cost += tail * ((flat >= low) & (flat < high))
    return cost
