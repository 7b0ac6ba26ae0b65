"""Floating-point operations of each part, multiply-adds counted as two, matrix products only.

These are the counts of torch's own `FlopCounterMode` in closed form (a test holds them equal), so a
trace costs nothing to write.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from deepenough.nn.embedding import cluster_width
from deepenough.nn.relative_attention import projects_queries
from deepenough.par.config import ParConfig
from deepenough.par.pattern import ATTENTION, DENSE, IDENTITY, OPEN


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
        both = (ATTENTION, DENSE)
        return sum(branch_flops(config, kind, lanes, new, keys, projected) for kind in both)
    projected = keys if projected is None else projected
    maps = 2 * lanes * (new * 2 * d * d + projected * 2 * d * d)
    queries, distances = lanes * new, keys + 1
    if projects_queries(queries, d // config.num_heads):
        positions = 2 * queries * d * d + 2 * config.num_heads * queries * distances * d
    else:
        positions = 2 * distances * d * d + 2 * queries * distances * d
    attention = 2 * lanes * new * keys * 2 * d
    return maps + positions + attention


def embedding_flops(config: ParConfig, ids: Tensor) -> Tensor:
    """Of the input embeddings, one number a token: the projections of the adaptive form."""
    flat = ids.flatten().cpu()
    cost = torch.zeros(len(flat), dtype=torch.float64)
    if config.adaptive_input:
        for cluster, (low, high) in _tail_clusters(config):
            inner = cluster_width(config.d_model, config.div_value, cluster)
            cost += 2.0 * inner * config.d_model * ((flat >= low) & (flat < high))
    return cost


def head_flops(config: ParConfig, num_tokens: int, targets: Tensor | None = None) -> Tensor:
    """Of the output layer, one number a token.

    With targets the adaptive softmax computes only the clusters they fall into, and nothing for
    those to be ignored (-100).
    """
    d = config.d_model
    if not config.cutoffs:
        return torch.full((num_tokens,), 2.0 * d * config.vocab_size, dtype=torch.float64)
    head = 2.0 * d * (config.cutoffs[0] + len(config.cutoffs))
    cost = torch.full((num_tokens,), head, dtype=torch.float64)
    flat = None if targets is None else targets.flatten().cpu()
    for cluster, (low, high) in _tail_clusters(config):
        inner = cluster_width(d, config.div_value, cluster)
        tail = 2.0 * inner * (d + high - low)
        cost += tail if flat is None else tail * ((flat >= low) & (flat < high))
    return cost if flat is None else cost * (flat != -100)


def _tail_clusters(config: ParConfig) -> list[tuple[int, tuple[int, int]]]:
    """Number and bounds of every cluster after the first."""
    return list(enumerate(pairwise([*config.cutoffs, config.vocab_size]), start=1))
