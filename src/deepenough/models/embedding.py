"""Token embeddings, plain or adaptive (arXiv 1809.10853).

The adaptive form gives frequent tokens the full width and each further cluster a width divided by
`factor` once more, projected up again: the input side of an adaptive softmax with the same cutoffs.
"""

import torch
from torch import Tensor, nn


class AdaptiveEmbedding(nn.Module):
    def __init__(self, vocab_size: int, width: int, cutoffs: list[int], factor: float) -> None:
        super().__init__()
        self.width = width
        self.bounds = [0, *cutoffs, vocab_size]
        self.tables = nn.ModuleList()
        self.projections = nn.ModuleList()
        for cluster, (low, high) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            inner = max(1, int(width // factor**cluster))
            self.tables.append(nn.Embedding(high - low, inner))
            self.projections.append(
                nn.Identity() if cluster == 0 else nn.Linear(inner, width, bias=False)
            )

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        first = self.tables[0].weight
        out = first.new_zeros(len(flat), self.width)
        for cluster, (low, high) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            rows = ((flat >= low) & (flat < high)).nonzero().squeeze(1)
            part = self.projections[cluster](self.tables[cluster](flat[rows] - low))
            out = out.index_copy(0, rows, part.to(out.dtype))
        return out.view(*ids.shape, self.width)


def embedding(
    vocab_size: int, width: int, cutoffs: list[int], factor: float, adaptive: bool
) -> nn.Module:
    if adaptive:
        return AdaptiveEmbedding(vocab_size, width, cutoffs, factor)
    return nn.Embedding(vocab_size, width)


@torch.no_grad()
def initialise(module: nn.Module, width: int) -> None:
    """Rows of about unit length after the projection, so that `sqrt(width)` gives unit variance."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.weight.normal_(std=width**-0.5)
