"""The decoder: target tokens, each of which sees those before it, and the source if there is one.

Shapes: B sentences, T new tokens, K tokens with those in the cache, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.encoder import embed, place_signals
from deepenough.lazy.equilibrium import run_moving
from deepenough.lazy.flops import decoder_trace
from deepenough.lazy.sight import BatchSight, Source, causal_mask, later_mask, own_cache
from deepenough.lazy.stack import Steps, StepStack
from deepenough.nn.layers import Dropout
from deepenough.trace import DepthTrace


class Decoded(NamedTuple):
    steps: Steps
    num_keys: int
    num_source: int | None
    real_BT: Tensor | None
    made_source: bool


class LazyDecoder(nn.Module):
    def __init__(
        self, config: LazyTransformerConfig, embedding: nn.Embedding, with_source: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.dropout = Dropout(config.dropout)
        self.stack = StepStack(config, config.decoder_steps, with_source)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        source: Source | None = None,
        cache: Cache | None = None,
        steps: int | None = None,
        epsilon: float = 0.0,
        patience: int | None = None,
        keep_states: bool = False,
    ) -> Decoded:
        """`attention_mask` is of all tokens, those in the cache included, `[B, K]`."""
        config = self.config
        num_steps = config.decoder_steps if steps is None else steps
        config.check_epsilon(epsilon, "decoder_epsilon")
        num_past = cache.get_seq_length() if cache is not None else 0
        num_new = input_ids.shape[1]
        state = embed(self.embedding, input_ids, self.dropout)
        positions = place_signals(self.stack, attention_mask, num_past, state)
        mask, causal = causal_mask(attention_mask, num_new, state), False
        if mask is None and num_past == 0:
            causal = num_new > 1
        elif mask is None:
            mask = later_mask(num_new, num_past + num_new, state)
        sight = BatchSight(config.num_heads, mask, causal, own_cache(cache), source)
        made_source = source is not None and not source.is_cached
        real = None if attention_mask is None else attention_mask[:, -num_new:]
        if epsilon > 0.0 and not self.training:
            patience = config.patience if patience is None else patience
            made = run_moving(
                self.stack, state, positions, sight, num_steps, epsilon, patience, real, keep_states
            )
        else:
            made = self.stack(state, positions, sight, num_steps, keep_states)
        num_source = None if source is None else source.states.shape[1]
        return Decoded(made, num_past + num_new, num_source, real, made_source)

    def trace(self, decoded: Decoded, num_scored: int) -> DepthTrace:
        """What was computed, with the scores of the last `num_scored` tokens."""
        shape = decoded.steps.ran.shape[:2]
        scored = torch.arange(shape[1]).expand(shape) >= shape[1] - num_scored
        return decoder_trace(
            self.config,
            decoded.steps,
            decoded.num_keys,
            decoded.num_source,
            decoded.real_BT,
            scored,
            decoded.made_source,
        )
