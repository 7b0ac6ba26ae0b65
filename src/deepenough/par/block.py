"""One block: attention, dense, identity, or all three weighted while the search is open.

Each branch is residual with the norm first: `x + F(norm(x))`. Since the weights of a block sum to
one, `w_a (x + A) + w_d (x + D) + w_i x` is `x + w_a A + w_d D`, and both branches read one norm.
That norm has no scale or shift of its own, because the linear maps behind it hold them; so memories
can be kept normalised, which is done once instead of at every reading.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from deepenough.nn.dropout import Dropout
from deepenough.nn.relative_attention import RelativeAttention
from deepenough.par.config import ParConfig
from deepenough.par.context import Context
from deepenough.par.pattern import ATTENTION, DENSE, IDENTITY, OPEN


class Dense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        # Rows in two dimensions: a linear map of more returns a view of its result, and changing
        # that in place would make autograd copy it several times over.
        inner = self.up(x.flatten(0, -2)).relu_()
        return self.down(inner).view_as(x)


class ParBlock(nn.Module):
    def __init__(self, config: ParConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = self.dense = None
        if kind in (ATTENTION, OPEN):
            self.attention = RelativeAttention(
                config.d_model, config.num_heads, config.attention_dropout
            )
        if kind in (DENSE, OPEN):
            self.dense = Dense(config.d_model, config.d_ff)
        self.dropout = Dropout(config.dropout)

    @property
    def attends(self) -> bool:
        return self.kind in (ATTENTION, OPEN)

    def forward(
        self,
        hidden_BSD: Tensor,
        context: Context,
        memory_BMD: Tensor | None = None,
        cache: Cache | None = None,
        cache_index: int = 0,
        weights_B3: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New hidden states, and the normalised old ones from which memory is made."""
        if self.kind == IDENTITY:
            return hidden_BSD, hidden_BSD
        normed = F.layer_norm(hidden_BSD, hidden_BSD.shape[-1:])
        if self.attends:
            assert self.attention is not None
            seen = normed if memory_BMD is None else torch.cat([memory_BMD, normed], 1)
            key, value = self.attention.keys_values(seen)
            if cache is not None:
                # Caches differ in how much they keep; what lies beyond the window is cut off.
                num_keys = context.mask.shape[-1]
                key, value = (x[:, :, -num_keys:] for x in cache.update(key, value, cache_index))
            mixed = self.attention(normed, key, value, context.codes, context.mask)
            hidden_BSD = self._add(hidden_BSD, mixed, weights_B3, 0)
        if self.kind in (DENSE, OPEN):
            assert self.dense is not None
            hidden_BSD = self._add(hidden_BSD, self.dense(normed), weights_B3, 1)
        return hidden_BSD, normed

    def _add(self, hidden: Tensor, update: Tensor, weights: Tensor | None, branch: int) -> Tensor:
        update = self.dropout(update)
        if weights is None:
            return hidden + update
        return torch.addcmul(hidden, update, weights[:, branch, None, None])
