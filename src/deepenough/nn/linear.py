"""A linear map that is also fast for the few rows of a beam search."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEW = range(16, 49)
"""Rows for which the transposed product is the faster one on processors."""
WIDE = 512
"""Width from which on."""


class Linear(nn.Linear):
    """`nn.Linear`, but weights times transposed rows where that is faster.

    For 16 to 48 rows of 512 values and more, a row times the weights runs at a fifth of the rate of
    matrix products; the same numbers asked for the other way round come up to three times sooner.
    """

    def forward(self, rows: Tensor) -> Tensor:
        if not self._few_on_a_processor(rows):
            return super().forward(rows)
        across = rows.reshape(-1, self.in_features).t()
        bias = self._parameters["bias"]
        if bias is None:
            made = torch.mm(self.weight, across)
        else:
            made = torch.addmm(bias[:, None], self.weight, across)
        return made.t().contiguous().view(*rows.shape[:-1], self.out_features)

    def _few_on_a_processor(self, rows: Tensor) -> bool:
        return (
            self.in_features >= WIDE
            and rows.numel() // self.in_features in FEW
            and rows.device.type == "cpu"
            and rows.dtype == torch.float32
            and not torch.is_grad_enabled()
        )
