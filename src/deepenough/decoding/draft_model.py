"""A draft model: a draft head, the linear drafter that it started from, and what is fastest here.

`DraftHead` is one transformer layer over the inputs of the linear drafter. With `e_t` the embedding
of token `t`, `x_t` its normed last state in units of its standard deviation, and
`z_t = [rms(e_t); x_(t-1)]`, the head predicts

    u_t = B z_t + b + O attention(z)_t
    x_t ~ u_t + D (silu(G rms(u_t)) * U rms(u_t))

`(B, b)` begins as the linear drafter's map and `O` and `D` as zero, so that an untrained head
drafts what the linear drafter drafts. Attention reads `z` of all tokens so far, with rotary
positions. To draft further, the head reads its own prediction where the state is not known yet:
`x_(t-1)` is replaced, and the attention of such a token sees the tokens before it as they were, and
itself as predicted. EAGLE (arXiv 2401.15077) drafts from the same inputs; EAGLE-3 (arXiv
2503.01840) trains on predictions. Departures: the closed-form start, and the units.

Shapes: B sequences, T tokens, N = B * T, D width, Z = 2 D, H heads, K width of a head, F inner
width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepenough.artifacts import load_artifact, save_artifact
from deepenough.config import bounded, from_fields
from deepenough.decoding.torch_backend import rotate
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter

if TYPE_CHECKING:
    from deepenough.decoding.drafters import LinearDrafter

INDEX, TENSORS = "draft_model.json", "draft_model.safetensors"
FORMAT, VERSION = "deepenough-draft-model", 1

_THETA = 10_000.0
_EPS = 1e-6


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a draft head."""

    width: int = bounded(ge=1)
    num_heads: int = bounded(ge=1)
    num_kv_heads: int = bounded(ge=1)
    head_dim: int = bounded(ge=1)
    intermediate_size: int = bounded(ge=1)

    def check(self) -> None:
        """Refuse heads that cannot share keys and values."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_kv_heads} do not divide {self.num_heads} heads.")

    @classmethod
    def of(cls, adapter: Adapter) -> HeadShape:
        """Return the shape of one of the model's own layers."""
        config: Any = adapter.model.config.get_text_config()
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or adapter.width // num_heads
        inner = getattr(config, "intermediate_size", None)
        return cls(
            width=adapter.width,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim + head_dim % 2,
            # A gated layer has three matrices where others have two of four times the width.
            intermediate_size=inner or -(-8 * adapter.width // 3),
        )


@dataclass(frozen=True)
class _Choice:
    names: list[str]
    num_draft_tokens: int = bounded(ge=1)
    vocab_size: int = bounded(ge=1)


class DraftHead(nn.Module):
    """One transformer layer that predicts the model's next state.

    `dropout` is that of what attention mixes and of the feed-forward layer's inner units.
    """

    def __init__(self, shape: HeadShape, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        width, mixed = shape.width, shape.num_heads * shape.head_dim
        joint = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> nn.Parameter:
            matrix = torch.randn(rows, columns, generator=generator)
            return nn.Parameter(matrix / math.sqrt(columns))

        self.register_buffer("scale", torch.ones(width))
        self.scale: Tensor
        """Standard deviation of each coordinate of the model's normed last states."""
        self.linear = nn.Parameter(torch.zeros(width, 2 * width))
        self.linear_bias = nn.Parameter(torch.zeros(width))
        self.qkv_proj = drawn(joint, 2 * width)
        self.o_proj = nn.Parameter(torch.zeros(width, mixed))
        self.norm = nn.Parameter(torch.ones(width))
        self.gate_up_proj = drawn(2 * shape.intermediate_size, width)
        self.down_proj = nn.Parameter(torch.zeros(width, shape.intermediate_size))

    @torch.no_grad()
    def start_from(self, matrix_DZ: Tensor, bias_D: Tensor, scale_D: Tensor) -> None:
        """Begin as the first map of a linear drafter, with states in units of `scale_D`."""
        self.scale.copy_(scale_D)
        own, state = matrix_DZ.chunk(2, dim=1)
        self.linear.copy_(torch.cat([own, state * scale_D], dim=1) / scale_D[:, None])
        self.linear_bias.copy_(bias_D / scale_D)

    def step(
        self,
        embeddings_BTD: Tensor,
        before_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return predicted states `[B, T, D]` of tokens, in units of the scale.

        `before_BTD` are the states of the tokens before them, in units of the scale; `attention`
        maps queries, keys and values `[B, T, H, K]` to what it mixes of them, `[N, H * K]`.
        """
        shape = self.shape
        batch, tokens, width = embeddings_BTD.shape
        inputs_BTZ = torch.cat([F.rms_norm(embeddings_BTD, (width,)), before_BTD], dim=-1)
        inputs_NZ = inputs_BTZ.flatten(0, 1)
        heads = F.linear(inputs_NZ, self.qkv_proj).view(batch, tokens, -1, shape.head_dim)
        rotated = rotate(heads[:, :, : shape.num_heads + shape.num_kv_heads], rotary)
        mixed = attention(
            rotated[:, :, : shape.num_heads],
            rotated[:, :, shape.num_heads :],
            heads[:, :, shape.num_heads + shape.num_kv_heads :],
        )
        mixed = F.dropout(mixed, self.dropout, self.training)
        hidden = F.linear(inputs_NZ, self.linear, self.linear_bias) + F.linear(mixed, self.o_proj)
        normed = F.rms_norm(hidden, (width,), self.norm, _EPS)
        gate, up = F.linear(normed, self.gate_up_proj).chunk(2, dim=-1)
        inner = F.dropout(F.silu(gate) * up, self.dropout, self.training)
        hidden = hidden + F.linear(inner, self.down_proj)
        return hidden.view(batch, tokens, -1)

    def forward(self, embeddings_BTD: Tensor, states_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the states of whole texts twice, as in training.

        Returns predictions from the true states `states_BTD` (in units of the scale) before each
        token, and predictions from those predictions, as second drafts are made.
        """
        before = F.pad(states_BTD, (0, 0, 1, 0))[:, :-1]
        rotary = rotary_cos_sin(torch.arange(embeddings_BTD.shape[1]), self.shape, embeddings_BTD)
        seen: list[Tensor] = []

        def first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen.extend((key, value))
            return self._attend(query, key, value, None)

        def second(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            itself = torch.eye(query.shape[1], dtype=torch.bool, device=query.device)
            earlier = torch.ones_like(itself).tril(-1)
            keys, values = torch.cat([seen[0], key], 1), torch.cat([seen[1], value], 1)
            return self._attend(query, keys, values, torch.cat([earlier, itself], 1))

        one = self.step(embeddings_BTD, before, rotary, first)
        predicted = F.pad(one, (0, 0, 1, 0))[:, :-1]
        return one, self.step(embeddings_BTD, predicted, rotary, second)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.shape.num_heads > self.shape.num_kv_heads,
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def rotary_cos_sin(positions: Tensor, shape: HeadShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotary cosines and signed sines, `[..., 1, K]` for positions `[...]`."""
    half = shape.head_dim // 2
    rates = _THETA ** (-torch.arange(half, device=like.device) / half)
    angles = positions.to(like.device)[..., None] * rates
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return both[0][..., None, :].to(like.dtype), both[1][..., None, :].to(like.dtype)


class DraftModel:
    """All that `deepenough decode tune` has made of a model.

    `meta` says how, and how often drafts are right; `choice` which arguments `names`,
    `num_draft_tokens` and `vocab_size` of `make_drafter` were fastest, and how that was measured.
    """

    def __init__(
        self,
        linear_drafter: LinearDrafter,
        head: DraftHead,
        meta: Mapping[str, Any] | None = None,
        choice: Mapping[str, Any] | None = None,
    ) -> None:
        self.linear_drafter, self.head = linear_drafter, head
        self.meta = dict(meta or {})
        self.choice = dict(choice or {})

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write everything into a folder: safetensors and JSON."""
        self.linear_drafter.save_pretrained(folder)
        index = {"format": FORMAT, "version": VERSION, "shape": asdict(self.head.shape)}
        index |= {"meta": self.meta, "choice": self.choice}
        try:
            save_artifact(Path(folder) / TENSORS, self.head.state_dict(), index)
        except OSError as error:
            raise UserError(f"The draft model cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> DraftModel:
        """Read what `deepenough decode tune` wrote: its run folder, or the folder `model` in it."""
        inner = Path(folder) / "model"
        place = inner if (inner / INDEX).is_file() else Path(folder)
        if not (place / INDEX).is_file():
            raise UserError(
                f"{folder} holds no draft model ({INDEX}): give the folder of a finished "
                "deepenough decode tune, or let it finish with --resume."
            )
        from deepenough.decoding.drafters import LinearDrafter

        linear = LinearDrafter.from_pretrained(place)
        try:
            tensors, index = load_artifact(place / TENSORS, FORMAT, VERSION)
            shape = from_fields(HeadShape, index["shape"])
            heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            sizes = {"qkv_proj": 2 * heads, "linear": 2 * shape.width}
            sizes |= {"down_proj": shape.intermediate_size}
            # Before a head of that size takes memory.
            if any(tensors[name].numel() != shape.width * size for name, size in sizes.items()):
                raise ValueError("its tensors are not of the shape that it names")
            head = DraftHead(shape)
            head.load_state_dict(tensors)
            head.eval().requires_grad_(False)
            if choice := index.get("choice"):
                from_fields(_Choice, {field.name: choice[field.name] for field in fields(_Choice)})
            return cls(linear, head, index["meta"], choice)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{place / INDEX} cannot be used ({error}): tune it again.") from error
