"""What tokens see: one another, as far as masks allow, and in a decoder the source as well.

A block asks its `Sight` for attention and so does not know whether its tokens stand in a padded
batch or in one list, nor where keys and values are kept. Keys and values of the tokens themselves
belong to a step, hence one cache layer a step. Those of the source belong to a block, whose maps
they come from: a block that is applied again and again finds them where it left them.

Shapes: B sentences, T new tokens, K tokens seen, S source tokens, D width, H heads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache


class SourceMaps(Protocol):
    """The part of a block that the source goes through."""

    index: int

    def source_keys_values(self, states_BSD: Tensor) -> tuple[Tensor, Tensor]: ...


class Sight(Protocol):
    """Attention of rows of tokens, `[..., D]` in and out."""

    def own(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor: ...

    def source(self, query: Tensor, maps: SourceMaps) -> Tensor: ...


class Source:
    """Encoder states as keys and values, made once for each block."""

    def __init__(
        self, states_BSD: Tensor, mask: Tensor | None, num_heads: int, cache: Cache | None = None
    ) -> None:
        self.states, self.mask, self.num_heads = states_BSD, mask, num_heads
        self.cache = cache if isinstance(cache, EncoderDecoderCache) else None
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_cached(self) -> bool:
        return self.cache is not None and any(self.cache.is_updated.values())

    def keys_values(self, maps: SourceMaps) -> tuple[Tensor, Tensor]:
        if maps.index not in self._made:
            self._made[maps.index] = self._find(maps)
        return self._made[maps.index]

    def _find(self, maps: SourceMaps) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return self._make(maps)
        kept: Any = self.cache.cross_attention_cache
        if self.cache.is_updated.get(maps.index):
            return kept.layers[maps.index].keys, kept.layers[maps.index].values
        self.cache.is_updated[maps.index] = True
        return update_cache(kept, *self._make(maps), maps.index)

    def _make(self, maps: SourceMaps) -> tuple[Tensor, Tensor]:
        key, value = maps.source_keys_values(self.states)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)


class BatchSight:
    """Of all tokens of a padded batch, rows `[B, T, D]`."""

    def __init__(
        self,
        num_heads: int,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: Cache | None = None,
        source: Source | None = None,
    ) -> None:
        """`causal` is a mask that needs no memory: each token sees itself and those before it."""
        self.num_heads, self.mask, self.causal = num_heads, mask, causal
        self.cache = own_cache(cache)
        self.source_of = source

    def own(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        query, key, value = (split_heads(part, self.num_heads) for part in (query, key, value))
        if self.cache is not None:
            key, value = update_cache(self.cache, key, value, step)
        return join_heads(attend(query, key, value, self.mask, self.causal))

    def source(self, query: Tensor, maps: SourceMaps) -> Tensor:
        assert self.source_of is not None
        key, value = self.source_of.keys_values(maps)
        query = split_heads(query, self.num_heads)
        return join_heads(attend(query, key, value, self.source_of.mask))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Scaled by the root of the head's width, torch's default."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


def split_heads(rows_BTD: Tensor, num_heads: int) -> Tensor:
    """`[B, H, T, D/H]`, a view."""
    return rows_BTD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def own_cache(cache: Cache | None) -> Cache | None:
    """The part of a cache that keeps what tokens see of one another."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def update_cache(cache: Cache, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one step, those of earlier tokens before them."""
    # generate() makes as many layers as the config has steps; a call may ask for more.
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    found: tuple[Tensor, Tensor] = cache.update(key, value, index)
    return found


def padding_mask(attention_mask_BK: Tensor | None, like: Tensor) -> Tensor | None:
    """`[B, 1, 1, K]`, to be added to scores; None where nothing is padding."""
    if attention_mask_BK is None or bool(attention_mask_BK.all()):
        return None
    return _additive(attention_mask_BK.bool()[:, None, None, :], like)


def causal_mask(attention_mask_BK: Tensor | None, num_new: int, like: Tensor) -> Tensor | None:
    """`[B, 1, T, K]`, for the last `num_new` of K tokens; None where nothing is padding.

    A token always sees itself: one of the padding has nothing else to look at.
    """
    if attention_mask_BK is None or bool(attention_mask_BK.all()):
        return None
    num_keys = attention_mask_BK.shape[1]
    before = _lower_triangle(num_new, num_keys, like.device)
    self_alone = torch.eye(num_keys, dtype=torch.bool, device=like.device)[-num_new:]
    seen = (attention_mask_BK.bool()[:, None, :] & before) | self_alone
    return _additive(seen[:, None], like)


def later_mask(num_new: int, num_keys: int, like: Tensor) -> Tensor | None:
    """`[T, K]`, for new tokens behind cached ones; None where there is one that sees all."""
    if num_new == 1:
        return None
    return _additive(_lower_triangle(num_new, num_keys, like.device), like)


def _lower_triangle(num_new: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.ones(num_new, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_new)


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))
