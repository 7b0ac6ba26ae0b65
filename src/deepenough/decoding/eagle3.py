"""EAGLE-3 (arXiv 2503.01840): a draft head of one layer over three layers of the model.

With `h_a, h_b, h_c` the inputs of three layers of the model at token `t`, and `e` the embedding of
the token after it,

    g_t = F [h_a; h_b; h_c]
    u_t = g_t + O attention([rms(e_(t+1)); rms(g)])_t
    v_t = u_t + D (silu(G rms(u_t)) * U rms(u_t))
    logits of token t + 2, over the draft vocabulary = W rms(v_t)

and to draft further, `v_t` takes the place of `g_(t+1)`, which is not known yet. This is what vLLM,
SGLang and llama.cpp run, with the names of its tensors (`norm_before_residual` is false). Added is
`input_scale` alone, a unit of each input channel for the optimiser, which `export.py` folds into F.

Training-time test: the head is trained as it is used. In step `k`, position `t` reads what step
`k - 1` gave for `t - 1`, and its attention sees positions up to `t - k + 1` as the model's states
make them and the `k - 1` between as the earlier steps do.

Shapes: B texts, T tokens, D width, Z = 3 D, H heads, K width of a head, S draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from deepenough.config import bounded
from deepenough.decoding.drafters import Drafter, Proposal, make_proposal, most_likely
from deepenough.decoding.engine import Engine
from deepenough.decoding.kv_cache import KVCache, StepContext, attend
from deepenough.decoding.request import SequenceState
from deepenough.decoding.torch_backend import rotate
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter

#: Drafts that the head is trained to make in a row.
NUM_STEPS = 3


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of a head, with the names that engines know them by."""

    hidden_size: int = bounded(ge=1)
    num_attention_heads: int = bounded(ge=1)
    num_key_value_heads: int = bounded(ge=1)
    head_dim: int = bounded(ge=2)
    intermediate_size: int = bounded(ge=1)
    draft_vocab_size: int = bounded(ge=2)
    rms_norm_eps: float = bounded(gt=0)
    rope_theta: float = bounded(gt=1)
    layers: tuple[int, ...] = bounded(ge=0)
    """The three layers of the model whose inputs are read."""

    def check(self) -> None:
        """Refuse heads that cannot share keys and values, and other numbers of layers."""
        uneven = self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2
        if uneven or len(self.layers) != 3:
            raise UserError(
                "A draft head shares its keys evenly and reads 3 layers: tune it again."
            )

    @classmethod
    def of(cls, adapter: Adapter, draft_vocab_size: int) -> Eagle3Config:
        """Return the sizes of one of the model's own layers, as far as they are those of Llama."""
        config: Any = adapter.model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or adapter.width // heads
        rope = getattr(config, "rope_parameters", None) or {}
        # A gated layer has three matrices where others have two of four times the width.
        inner = getattr(config, "intermediate_size", None) or -(-8 * adapter.width // 3)
        return cls(
            hidden_size=adapter.width,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim + head_dim % 2,
            intermediate_size=inner,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            layers=layers_read(adapter.num_layers),
        )


def layers_read(num_layers: int) -> tuple[int, ...]:
    """Return the layers that engines read by default: an early, the middle and a late one."""
    return tuple(sorted((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))))


class Eagle3Head(nn.Module):
    """The head; names and shapes of its parameters are the public ones."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_heads, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=config.rms_norm_eps)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        attention = {name: linear(2 * width, kv_heads) for name in ("k_proj", "v_proj")}
        attention |= {"q_proj": linear(2 * width, heads), "o_proj": linear(heads, width)}
        mlp = {name: linear(width, inner) for name in ("gate_proj", "up_proj")}
        layer: dict[str, nn.Module] = {
            name: norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        layer["self_attn"] = nn.ModuleDict(attention)
        layer["mlp"] = nn.ModuleDict(mlp | {"down_proj": linear(inner, width)})
        self.fc = linear(3 * width, width)
        self.midlayer: Any = nn.ModuleDict(layer)
        self.norm = norm()
        self.lm_head = linear(width, config.draft_vocab_size)
        self.d2t: Tensor
        """What to add to a place in the draft vocabulary for the token."""
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.input_scale: Tensor
        self.register_buffer("input_scale", torch.ones(3 * width))

    @property
    def tokens_S(self) -> Tensor:
        """The tokens that can be drafted, in ascending order."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, inputs_BTZ: Tensor) -> Tensor:
        """Return `g` `[B, T, D]` of the inputs of three layers."""
        features: Tensor = self.fc(inputs_BTZ / self.input_scale)
        return features.to(inputs_BTZ.dtype)  # under autocast, the residual stays as it was

    def step(
        self,
        embeddings_BTD: Tensor,
        features_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return `v` of positions: `features_BTD` there, and embeddings of the tokens after.

        `attention` maps queries, keys and values `[B, T, H, K]` to what it mixes, `[B * T, H * K]`.
        """
        layer = self.midlayer
        own, mlp = layer.self_attn, layer.mlp
        batch, tokens, width = embeddings_BTD.shape
        normed = layer.input_layernorm(embeddings_BTD), layer.hidden_norm(features_BTD)
        inputs_BTZ = torch.cat(normed, dim=-1)
        shape = (batch, tokens, -1, self.config.head_dim)
        query, key, value = (own[f"{name}_proj"](inputs_BTZ).view(shape) for name in "qkv")
        mixed = attention(rotate(query, rotary), rotate(key, rotary), value)
        hidden = features_BTD + own.o_proj(mixed).view(batch, tokens, width)
        normed_BTD = layer.post_attention_layernorm(hidden)
        inner = F.silu(mlp.gate_proj(normed_BTD)) * mlp.up_proj(normed_BTD)
        return hidden + mlp.down_proj(inner)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., S]` of what `step` gave."""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found

    def forward(self, embeddings_BTD: Tensor, inputs_BTZ: Tensor) -> list[Tensor]:
        """Return what each of `NUM_STEPS` steps gives for whole texts, as in training.

        `embeddings_BTD` are those of the tokens after those that `inputs_BTZ` belong to.
        """
        tokens = embeddings_BTD.shape[1]
        rotary = rotary_cos_sin(torch.arange(tokens), self.config, embeddings_BTD)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=embeddings_BTD.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        features = self.fuse(inputs_BTZ)
        for number in range(NUM_STEPS):
            # The last key of each later step that a position has come by, and its own.
            between = [seen.tril(-back) & seen.triu(-back) for back in reversed(range(number))]
            mask = torch.cat([seen.tril(-number), *between], dim=1)

            def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor = mask) -> Tensor:
                keys.append(key.transpose(1, 2))
                values.append(value.transpose(1, 2))
                mixed = F.scaled_dot_product_attention(
                    query.transpose(1, 2),
                    torch.cat(keys, dim=2),
                    torch.cat(values, dim=2),
                    mask,
                    enable_gqa=query.shape[2] > key.shape[2],
                )
                return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

            found.append(self.step(embeddings_BTD, features, rotary, attention))
            features = F.pad(found[-1], (0, 0, 1, 0))[:, :-1]
        return found


def rotary_cos_sin(positions: Tensor, config: Eagle3Config, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotary cosines and signed sines, `[..., 1, K]` for positions `[...]`."""
    half = config.head_dim // 2
    rates = config.rope_theta ** (-torch.arange(half, device=like.device) / half)
    angles = positions.to(like.device)[..., None] * rates
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return both[0][..., None, :].to(like.dtype), both[1][..., None, :].to(like.dtype)


# -- drafting ------------------------------------------------------------------------------------


class TorchHead:
    """A head that drafts for an engine, with a cache of its own."""

    def __init__(self, head: Eagle3Head, engine: Engine) -> None:
        self.head, self.engine = head, engine

    def begin(self, sequences: int, capacity: int) -> None:
        """Start with an empty cache for so many sequences and tokens."""
        config, like = self.head.config, self.head.input_scale
        size = (sequences, config.num_key_value_heads, capacity, config.head_dim)
        self._cache, self._sequences = KVCache(1, size, like.dtype, like.device), sequences
        self._rotary = rotary_cos_sin(torch.arange(capacity), config, like)

    def fuse(self, inputs: Tensor) -> Tensor:
        """Return `g` `[..., D]` of the inputs of three layers, `[..., 3 D]`."""
        return self.head.fuse(inputs)

    def step(
        self, tokens_BT: Tensor, features_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Return `v` of some sequences, whose tokens begin behind `starts` cached ones."""
        config, (cos, sin) = self.head.config, self._rotary
        context = StepContext(
            list(starts),
            tokens_BT.shape[1],
            config.num_attention_heads // config.num_key_value_heads,
            features_BTD.dtype,
            features_BTD.device,
            rows=None if len(rows) == self._sequences else list(rows),
        )
        return self.head.step(
            self.engine.embeddings(tokens_BT),
            features_BTD,
            (cos[context.positions], sin[context.positions]),
            lambda query, key, value: attend(context, self._cache, 0, query, key, value),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., S]` of what `step` gave."""
        return self.head.logits(hidden)


class Eagle3Drafter(Drafter):
    """Drafts by a head, token after token, over a cache of its own.

    Before a pass of the model, the head reads the tokens that the last pass has confirmed, with the
    layer inputs that pass has left, and drafts the next token; then it reads its own drafts with
    its own predictions. Those are forgotten: the cache keeps only what was confirmed.
    """

    reads_states = True

    def __init__(self, head: Eagle3Head, num_draft_tokens: int = NUM_STEPS) -> None:
        super().__init__(num_draft_tokens)
        self.head, self.layers_read = head, head.config.layers

    def begin(self, engine: Engine) -> None:
        """Start a new generation from the layer inputs of the prompts."""
        model = engine.adapter.model
        scale = self.head.input_scale
        if (scale.device, scale.dtype) != (model.device, model.dtype):
            # A copy: others may draft with the same head for a model of another dtype.
            self.head = copy.deepcopy(self.head).to(model.device, model.dtype)
        self._engine, self._tokens_S = engine, self.head.tokens_S
        self._runner = engine.draft_head(self.head) or TorchHead(self.head, engine)
        # Shorter sequences are padded behind their last token, as far as the longest confirmed.
        self._runner.begin(len(engine.prompt), engine.capacity + self.num_draft_tokens + 1)
        # Positions of each sequence that the cache holds, and `g` `[T, D]` of those it does not.
        self._cached = [0] * len(engine.prompt)
        self._pending = [self._runner.fuse(inputs_TZ) for inputs_TZ in engine.prompt_inputs]

    def observe(self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        """Keep `g` of confirmed tokens until the next drafts."""
        features_BTD = self._runner.fuse(self._engine.layer_inputs)
        for row, features_TD, count in zip(rows, features_BTD, counts, strict=True):
            pending = self._pending[row.index]
            self._pending[row.index] = torch.cat([pending, features_TD[:count]])

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return the best tokens of the draft vocabulary by the logits of the head."""
        indices = [row.index for row in rows]
        counts = [len(self._pending[index]) for index in indices]
        longest = max(counts)
        lines = []
        for row, count in zip(rows, counts, strict=True):
            first = self._cached[row.index] + 1
            lines.append(row.context[first : first + count] + [0] * (longest - count))
        features_BTD = pad_sequence([self._pending[index] for index in indices], batch_first=True)
        tokens_BT = torch.tensor(lines, device=features_BTD.device)
        hidden_BTD = self._run(tokens_BT, features_BTD, indices)
        for index, count in zip(indices, counts, strict=True):
            self._cached[index] += count
            self._pending[index] = features_BTD[0, :0]
        last = torch.tensor(counts, device=hidden_BTD.device) - 1
        hidden_BD = hidden_BTD[torch.arange(len(rows), device=last.device), last]
        drafts, head, logits = self.num_wanted, self.head, self._runner.logits
        places = [most_likely(logits(hidden_BD), self._tokens_S)]
        for ahead in range(drafts - 1):
            hidden_BD = self._run(places[-1][0][:, None], hidden_BD[:, None], indices, ahead)[:, 0]
            places.append(most_likely(logits(hidden_BD), self._tokens_S))
        layer = sum(p.numel() for p in head.midlayer.parameters())
        flops = layer * (longest + drafts - 1) + head.fc.weight.numel() * longest
        flops += head.lm_head.weight.numel() * drafts
        return make_proposal(places, 2.0 * flops)

    def _run(
        self, tokens_BT: Tensor, features_BTD: Tensor, indices: list[int], ahead: int = 0
    ) -> Tensor:
        """Return `v` for tokens of some sequences, `ahead` behind what is cached."""
        starts = [self._cached[index] + ahead for index in indices]
        found: Tensor = self._runner.step(tokens_BT, features_BTD, starts, indices)
        return found


# -- prediction ----------------------------------------------------------------------------------


def count_accepted(right_KT: Tensor, first: int = 0, last: int | None = None) -> list[int]:
    """Return rounds of drafting over a text, and how many accepted draft 1, 2, ...

    `right_KT` says whether draft `k`, made at a position of the text, is the token that follows
    there. A round begins at position `first`, the next behind what it has accepted and the token
    that the model adds, up to position `last`.
    """
    steps, tokens = right_KT.shape
    right, counts = right_KT.tolist(), [0] * (steps + 1)
    place, last = first, tokens if last is None else last
    while place < last:
        counts[0] += 1
        accepted = 0
        while accepted < steps and place + accepted < tokens and right[accepted][place + accepted]:
            accepted += 1
            counts[accepted] += 1
        place += accepted + 1
    return counts
