"""A draft head: one transformer layer over what carry maps read, which starts as the carry map.

With `e_t` the embedding of token `t`, `x_t` its normed last state in units of its deviation, and
`z_t = [rms(e_t); x_(t-1)]`, the head predicts

    u_t = B z_t + b + O attention(z)_t
    x_t ~ u_t + D (silu(G rms(u_t)) * U rms(u_t))

`(B, b)` begins as the carry map (`carry.py`), `O` and `D` begin as zero, so that an untrained head
drafts what carry drafts. Attention reads `z` of all tokens so far, with rotary positions. To draft
further, the head reads its own prediction where the state is not known yet: `x_(t-1)` is replaced,
and the attention of such a token sees the tokens before it as they were, and itself as predicted.

EAGLE (arXiv 2401.15077) drafts from the same inputs, EAGLE-3 (arXiv 2503.01840) lets attention read
both of them and trains on predictions. Departures: the closed-form start, and the units.

Shapes: B rows, T tokens, N = B * T, D width, Z = 2 D, H heads, K width of a head, F inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepenough.hf.adapter import Adapter

_THETA = 10_000.0
_EPS = 1e-6

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries, keys and values `[B, T, H, K]` to what is mixed, `[B * T, H * K]`."""


@dataclass(frozen=True)
class HeadShape:
    width: int
    heads: int
    key_heads: int
    head_width: int
    inner: int

    @classmethod
    def of(cls, adapter: Adapter) -> HeadShape:
        """As one of the model's own layers."""
        config: Any = adapter.model.config.get_text_config()
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or adapter.width // heads
        inner = getattr(config, "intermediate_size", None)
        return cls(
            width=adapter.width,
            heads=heads,
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=head_width + head_width % 2,
            # A gated layer has three matrices where others have two of four times the width.
            inner=inner or -(-8 * adapter.width // 3),
        )

    @property
    def joint(self) -> int:
        """Queries, keys and values of a token."""
        return (self.heads + 2 * self.key_heads) * self.head_width


class DraftHead(nn.Module):
    def __init__(self, shape: HeadShape, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        width, mixed = shape.width, shape.heads * shape.head_width
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> nn.Parameter:
            matrix = torch.randn(rows, columns, generator=generator)
            return nn.Parameter(matrix / math.sqrt(columns))

        self.register_buffer("scale", torch.ones(width))
        self.scale: Tensor
        """Deviation of each coordinate of the model's normed last states."""
        self.carry = nn.Parameter(torch.zeros(width, 2 * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.into_heads = drawn(shape.joint, 2 * width)
        self.out_of_heads = nn.Parameter(torch.zeros(width, mixed))
        self.norm = nn.Parameter(torch.ones(width))
        self.gate_up = drawn(2 * shape.inner, width)
        self.down = nn.Parameter(torch.zeros(width, shape.inner))

    @torch.no_grad()
    def start_from(self, matrix_DZ: Tensor, bias_D: Tensor, scale_D: Tensor) -> None:
        """Begin as the carry map, in units of `scale_D`."""
        self.scale.copy_(scale_D)
        own, state = matrix_DZ.chunk(2, dim=1)
        self.carry.copy_(torch.cat([own, state * scale_D], dim=1) / scale_D[:, None])
        self.bias.copy_(bias_D / scale_D)

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """`z` of embeddings and of states in units of the scale."""
        return torch.cat([F.rms_norm(embeddings, embeddings.shape[-1:]), states], dim=-1)

    def step(self, inputs_BTZ: Tensor, codes: tuple[Tensor, Tensor], mix: Attention) -> Tensor:
        """Predictions `[B, T, D]`, in units of the scale."""
        shape = self.shape
        batch, tokens = inputs_BTZ.shape[:2]
        inputs_NZ = inputs_BTZ.flatten(0, 1)
        joint_NJ = F.linear(inputs_NZ, self.into_heads)
        heads = joint_NJ.view(batch, tokens, -1, shape.head_width)
        turned = turn(heads[:, :, : shape.heads + shape.key_heads], codes)
        mixed = mix(
            turned[:, :, : shape.heads],
            turned[:, :, shape.heads :],
            heads[:, :, shape.heads + shape.key_heads :],
        )
        mixed = F.dropout(mixed, self.dropout, self.training)
        hidden = F.linear(inputs_NZ, self.carry, self.bias) + F.linear(mixed, self.out_of_heads)
        normed = F.rms_norm(hidden, (shape.width,), self.norm, _EPS)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        inner = F.dropout(F.silu(gate) * up, self.dropout, self.training)
        hidden = hidden + F.linear(inner, self.down)
        return hidden.view(batch, tokens, -1)

    # -- training ----------------------------------------------------------------------------

    def forward(self, embeddings_BTD: Tensor, states_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions of whole texts, from the states before and from predictions of those.

        `states_BTD`, in units of the scale, are of the same tokens as the embeddings.
        """
        before = F.pad(states_BTD, (0, 0, 1, 0))[:, :-1]
        codes = position_codes(torch.arange(embeddings_BTD.shape[1]), self.shape, embeddings_BTD)
        seen: list[Tensor] = []

        def first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen.extend((key, value))
            return self._mix(query, key, value, None)

        def second(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            tokens = query.shape[1]
            earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril(-1)
            mask = torch.cat([earlier, torch.eye(tokens, dtype=torch.bool).to(query.device)], 1)
            keys, values = torch.cat([seen[0], key], 1), torch.cat([seen[1], value], 1)
            return self._mix(query, keys, values, mask)

        one = self.step(self.read(embeddings_BTD, before), codes, first)
        predicted = F.pad(one, (0, 0, 1, 0))[:, :-1]
        return one, self.step(self.read(embeddings_BTD, predicted), codes, second)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.shape.heads > self.shape.key_heads,
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def position_codes(positions: Tensor, shape: HeadShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary cosines and signed sines, `[..., 1, K]` for positions `[...]`."""
    half = shape.head_width // 2
    rates = _THETA ** (-torch.arange(half, device=like.device) / half)
    angles = positions.to(like.device)[..., None] * rates
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return both[0][..., None, :].to(like.dtype), both[1][..., None, :].to(like.dtype)


def turn(heads_BTHK: Tensor, codes: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions applied, as in `llama_layout.py`."""
    cos, sin = codes
    rolled = heads_BTHK.roll(heads_BTHK.shape[-1] // 2, -1)
    return torch.addcmul(heads_BTHK * cos, rolled, sin)
