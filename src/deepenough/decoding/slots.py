"""Keys and values of all layers in slots that are allocated once.

A row's token at position `p` lies in slot `p`: rows are aligned on the left, whatever side their
prompts were padded on, so that a slot is visible to a query exactly if it is not later. What lies
behind a row's kept tokens (rejected drafts, padding) is never seen and is written over.

Shapes: B rows, T tokens, H heads of keys, C capacity, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class Slots:
    """One tensor `[B, H, C, K]` of keys and one of values for every layer."""

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Slots that nobody may see are still read, with weight 0: they must be numbers.
        make = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        self.keys, self.values = make[:num_layers], make[num_layers:]

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.keys[0].device)
        self.keys = [keys.index_select(0, index) for keys in self.keys]
        self.values = [values.index_select(0, index) for values in self.values]

    def grow(self, capacity: int) -> None:
        """Room for so many tokens a row; what is there stays."""
        missing = capacity - self.keys[0].shape[2]
        if missing > 0:
            self.keys = [F.pad(keys, (0, 0, 0, missing)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, missing)) for values in self.values]


NO_SLOTS = Slots(0, (0, 0, 0, 0), torch.float32, torch.device("cpu"))


class Place:
    """Where the tokens of one step go, and what they may see.

    Where all rows stand at one position, slots are a slice; where they do not, an index. Queries of
    the heads that share keys stand in a row behind each other (`groups` for each token), so that
    keys and values are read where they lie instead of being repeated.

    With `rows`, the tokens are of these rows of the cache alone.
    """

    def __init__(
        self,
        starts: Sequence[int],
        num_tokens: int,
        groups: int,
        dtype: torch.dtype,
        device: str,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self.end = max(starts) + num_tokens
        self.start: int | None = starts[0] if len(set(starts)) == 1 else None
        self.mask: Tensor | None = None
        self.codes: tuple[Tensor, Tensor] | None = None
        """Position codes of the tokens, where a layout has any."""
        self.causal = self.start == 0 and num_tokens > 1
        steps = torch.arange(num_tokens, device=device)
        if self.start is not None:
            self.positions = (steps + self.start)[None]
            if num_tokens > 1 and not self.causal:
                self.mask = self._additive(self.positions[0], groups, dtype)
            return
        self.positions = steps + torch.tensor(starts, device=device)[:, None]
        self.mask = self._additive(self.positions, groups, dtype)[:, None]

    def _additive(self, positions: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """0 where a slot is visible and -inf where not, a line for every query."""
        slots = torch.arange(self.end, device=positions.device)
        hidden = slots > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(groups, dim=-2)

    def store(self, slots_BHCK: Tensor, new_BTHK: Tensor) -> Tensor:
        """Write, and give back all slots up to the last that any row has filled."""
        if self.start is None:
            rows = torch.arange(len(new_BTHK), device=new_BTHK.device)
            rows = rows if self.rows is None else self.rows
            slots_BHCK[rows[:, None], :, self.positions] = new_BTHK
        elif self.rows is None:
            slots_BHCK[:, :, self.start : self.end] = new_BTHK.transpose(1, 2)
        else:
            slots_BHCK[self.rows, :, self.start : self.end] = new_BTHK.transpose(1, 2)
        if self.rows is None:
            return slots_BHCK[:, :, : self.end]
        return slots_BHCK[self.rows, :, : self.end]


def attend(
    place: Place,
    slots: tuple[Tensor, Tensor],
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHK: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention over the slots of one layer, these tokens' included; `[B * T, H * K]`."""
    keys, values = place.store(slots[0], key_BTHK), place.store(slots[1], value_BTHK)
    batch, tokens, heads, head_width = query_BTHK.shape
    key_heads = key_BTHK.shape[2]
    groups = heads // key_heads
    if place.causal:
        mixed = F.scaled_dot_product_attention(
            query_BTHK.transpose(1, 2),
            keys,
            values,
            is_causal=True,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return mixed.transpose(1, 2).reshape(batch * tokens, -1)
    if tokens == 1:
        query = query_BTHK.reshape(batch, key_heads, groups, head_width)
        mixed = F.scaled_dot_product_attention(query, keys, values, place.mask, scale=scale)
        return mixed.reshape(batch, -1)
    shape = (batch, tokens, key_heads, groups, head_width)
    query = query_BTHK.reshape(shape).transpose(1, 2).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(query, keys, values, place.mask, scale=scale)
    mixed = mixed.view(batch, key_heads, tokens, groups, head_width)
    return mixed.transpose(1, 2).reshape(batch * tokens, -1)
