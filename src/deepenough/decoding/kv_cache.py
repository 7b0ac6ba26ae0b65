"""Keys and values of all layers in tensors that are allocated once, and attention over them.

The token of a sequence at position `p` is stored at index `p`: sequences are aligned on the left,
whatever side their prompts were padded on, so a cached token is visible to a query exactly if it is
not later. What lies behind a sequence's committed tokens (rejected drafts, padding) is never
attended to and is overwritten.

Shapes: B sequences, T tokens, H key-value heads, C capacity, K head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class KVCache:
    """One tensor `[B, H, C, K]` of keys and one of values for every layer."""

    def __init__(
        self,
        num_layers: int = 0,
        shape: tuple[int, int, int, int] = (0, 0, 0, 0),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        # Masked entries are still read, with weight 0: they must be finite numbers.
        made = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        self.keys, self.values = made[:num_layers], made[num_layers:]

    def grow(self, capacity: int) -> None:
        """Make room for so many tokens of each sequence."""
        more = max(0, capacity - self.keys[0].shape[2])
        self.keys, self.values = (
            [F.pad(each, (0, 0, 0, more)) if more else each for each in side]
            for side in (self.keys, self.values)
        )

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        index = torch.tensor(rows, device=self.keys[0].device)
        self.keys = [keys.index_select(0, index) for keys in self.keys]
        self.values = [values.index_select(0, index) for values in self.values]


class StepContext:
    """Where the tokens of one step are stored in a `KVCache`, and which tokens they attend to.

    Where all sequences stand at one position, they are stored as a slice; where they do not, by
    index. The queries of the heads that share keys are laid out as consecutive rows (`groups` for
    each token), so keys and values are read in place instead of being repeated.

    `starts` are the positions of the first of `num_tokens` new tokens of each sequence, `rows` the
    sequences of the cache that they belong to, None for all.
    """

    def __init__(
        self,
        starts: Sequence[int],
        num_tokens: int,
        groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self.end = max(starts) + num_tokens
        self.start: int | None = starts[0] if len(set(starts)) == 1 else None
        self.mask: Tensor | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None
        """Rotary cos/sin of the tokens, for layouts that have any."""
        self.causal = self.start == 0 and num_tokens > 1
        steps = torch.arange(num_tokens, device=device)
        if self.start is not None:
            self.positions = (steps + self.start)[None]
            if num_tokens > 1 and not self.causal:
                self.mask = self._additive_mask(self.positions[0], groups, dtype)
            return
        self.positions = steps + torch.tensor(starts, device=device)[:, None]
        self.mask = self._additive_mask(self.positions, groups, dtype)[:, None]

    def _additive_mask(self, positions: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Return 0 where a cached token is visible and -inf elsewhere, one row for every query."""
        cached = torch.arange(self.end, device=positions.device)
        hidden = cached > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(groups, dim=-2)

    def store(self, cached_BHCK: Tensor, new_BTHK: Tensor) -> Tensor:
        """Write keys or values, and return all up to the last position any sequence has filled."""
        rows = slice(None) if self.rows is None else self.rows
        if self.start is not None:
            cached_BHCK[rows, :, self.start : self.end] = new_BTHK.transpose(1, 2)
        else:
            every = torch.arange(len(new_BTHK)) if self.rows is None else self.rows
            cached_BHCK[every[:, None], :, self.positions] = new_BTHK
        return cached_BHCK[rows, :, : self.end]


def attend(
    context: StepContext,
    cache: KVCache,
    layer: int,
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Store new keys and values of a layer, attend over all cached ones, return `[B * T, H * K]`.

    There may be a multiple of the key-value heads in the queries. `scale` is the factor of the
    attention scores; None for `K ** -0.5`.
    """
    keys = context.store(cache.keys[layer], key_BTHK)
    values = context.store(cache.values[layer], value_BTHK)
    batch, tokens, heads, head_width = query_BTHK.shape
    kv_heads = key_BTHK.shape[2]
    groups = heads // kv_heads
    if context.causal:
        mixed = F.scaled_dot_product_attention(
            query_BTHK.transpose(1, 2),
            keys,
            values,
            is_causal=True,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return mixed.transpose(1, 2).reshape(batch * tokens, -1)
    shape = (batch, tokens, kv_heads, groups, head_width)
    query = query_BTHK.reshape(shape).transpose(1, 2).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(query, keys, values, context.mask, scale=scale)
    mixed = mixed.view(batch, kv_heads, tokens, groups, head_width)
    return mixed.transpose(1, 2).reshape(batch * tokens, -1)
