"""One block: what a step would add to every token's state.

Self-attention, in a decoder attention to the source, and a feed-forward network, each reading the
state with what the parts before it would add, through a norm of its own. The block returns the sum
of what they add; the transition around it decides how much of that is made. With all of it made,
this is the usual pre-norm block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.sight import Sight
from deepenough.nn.layers import Dropout, Linear


class Block(nn.Module):
    def __init__(self, config: LazyTransformerConfig, index: int, with_source: bool) -> None:
        super().__init__()
        d = config.d_model
        self.index = index
        self.attention_norm = nn.LayerNorm(d)
        self.attention_in = Linear(d, 3 * d, bias=False)
        self.attention_out = Linear(d, d, bias=False)
        self.with_source = with_source
        if with_source:
            self.source_norm = nn.LayerNorm(d)
            self.source_query = Linear(d, d, bias=False)
            self.source_memory = Linear(d, 2 * d, bias=False)
            self.source_out = Linear(d, d, bias=False)
        self.ff_norm = nn.LayerNorm(d)
        self.ff_in = Linear(d, config.d_ff)
        self.ff_out = Linear(config.d_ff, d)
        self.ff_dropout = Dropout(config.ff_dropout)

    def forward(self, state: Tensor, signal: Tensor, sight: Sight, step: int) -> Tensor:
        read = self.attention_norm(state) + signal
        query, key, value = self.attention_in(read).chunk(3, -1)
        update: Tensor = self.attention_out(sight.own(query, key, value, step))
        if self.with_source:
            query = self.source_query(self.source_norm(state + update))
            update = update + self.source_out(sight.source(query, self))
        inner = F.relu(self.ff_in(self.ff_norm(state + update)), inplace=True)
        return update + self.ff_out(self.ff_dropout(inner))

    def source_keys_values(self, states_BSD: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.source_memory(states_BSD).chunk(2, -1)
        return key, value
