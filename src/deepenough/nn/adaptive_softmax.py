"""The two ends of a model with a large vocabulary, each in clusters of falling width.

Output: the adaptive softmax (arXiv 1609.04309) is torch's `AdaptiveLogSoftmaxWithLoss`; where to
cut its clusters, `deepenough.nn.cutoffs` finds. Input: adaptive embeddings (arXiv 1809.10853) give
frequent tokens the full width and each further cluster a width divided by `factor` once more,
projected up again.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def cluster_width(width: int, factor: float, cluster: int) -> int:
    """Return the inner width of a cluster, counted from 0 for the most frequent tokens."""
    return int(width // factor**cluster)


class AdaptiveEmbedding(nn.Module):
    """Token embeddings, narrower for rarer tokens."""

    def __init__(self, vocab_size: int, width: int, cutoffs: list[int], factor: float) -> None:
        super().__init__()
        self.width = width
        self.bounds = [0, *cutoffs, vocab_size]
        self.tables = nn.ModuleList()
        self.projections = nn.ModuleList()
        for cluster, (low, high) in enumerate(pairwise(self.bounds)):
            inner = cluster_width(width, factor, cluster)
            self.tables.append(nn.Embedding(high - low, inner))
            self.projections.append(
                nn.Identity() if cluster == 0 else nn.Linear(inner, width, bias=False)
            )

    def forward(self, ids: Tensor) -> Tensor:
        """Return one row of `width` values for every id."""
        flat = ids.reshape(-1)
        rows_found, parts = [], []
        for cluster, (low, high) in enumerate(pairwise(self.bounds)):
            rows = ((flat >= low) & (flat < high)).nonzero().squeeze(1)
            rows_found.append(rows)
            parts.append(self.projections[cluster](self.tables[cluster](flat[rows] - low)))
        order = torch.cat(rows_found)
        if len(order) < len(flat):
            raise IndexError(f"token ids must be in [0, {self.bounds[-1]})")
        # Rows come cluster by cluster; the inverse of their order puts them back.
        out = torch.cat(parts).index_select(0, order.argsort())
        return out.view(*ids.shape, self.width)


def adaptive_embedding_ref(module: AdaptiveEmbedding, ids: Tensor) -> Tensor:
    """Return the same token by token: the row of its cluster's table, projected."""
    rows = []
    for token in ids.flatten().tolist():
        cluster = sum(token >= cut for cut in module.bounds[1:-1])
        row = module.tables[cluster](torch.tensor(token - module.bounds[cluster]))
        rows.append(module.projections[cluster](row))
    return torch.stack(rows).view(*ids.shape, module.width)
