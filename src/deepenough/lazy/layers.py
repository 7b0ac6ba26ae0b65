"""Layers of a Lazy Transformer: attention, positional encodings, the block, the stack, the loss.

A block asks its `AttentionContext` for attention and so does not need to know whether its tokens
form a padded batch or a flat list, nor where keys and values are kept. Self-attention keys and
values belong to a step, hence one cache layer per step. Cross-attention keys and values belong to a
block, whose projections they come from: a block that is applied repeatedly computes them once.

A stack applies one block again and again or, for the ordinary Transformer, one block after another.
`transformer` and `universal` apply every update in full; `lazy` applies the share that is new;
`act` applies them in full and returns the mean of all steps' states weighted by Adaptive
Computation Time per token (arXiv 1807.03819, section 2.2, and 1603.08983). As in its source, ACT
saves no compute: tokens that have halted continue so that others can attend to them.

Shapes: B sentences, T new tokens, K tokens attended to, S source tokens, D width, H heads, N
steps, V vocabulary, R predicted tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from deepenough.errors import UserError
from deepenough.lazy.config import ACT, LAZY, TRANSFORMER, LazyTransformerConfig
from deepenough.lazy.transition import LazyTransition, dropout_noise
from deepenough.nn.adaptive_computation_time import act_halting
from deepenough.nn.layers import Dropout

LONGEST_WAVE = 10_000.0

# -- attention -------------------------------------------------------------------------------------


class AttentionContext(Protocol):
    """What the tokens of a block may attend to; rows `[..., D]` in and out."""

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        """Attend to the tokens of the same sequence."""
        ...

    def cross_attention(self, query: Tensor, block: LazyBlock) -> Tensor:
        """Attend to the encoder's output through the block's own key and value projection."""
        ...


class EncoderMemory:
    """The encoder's output as cross-attention keys and values, computed once per block."""

    def __init__(
        self, states_BSD: Tensor, mask: Tensor | None, num_heads: int, cache: Cache | None = None
    ) -> None:
        self.states, self.mask, self.num_heads = states_BSD, mask, num_heads
        self.cache = cache if isinstance(cache, EncoderDecoderCache) else None
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_cached(self) -> bool:
        """Whether an earlier call has left keys and values in the cache."""
        return self.cache is not None and any(self.cache.is_updated.values())

    def keys_values(self, block: LazyBlock) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block, `[B, H, S, D/H]` each."""
        if block.index not in self._computed:
            self._computed[block.index] = self._cached_keys_values(block)
        return self._computed[block.index]

    def _cached_keys_values(self, block: LazyBlock) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return self._project(block)
        cache: Any = self.cache.cross_attention_cache
        if self.cache.is_updated.get(block.index):
            return cache.layers[block.index].keys, cache.layers[block.index].values
        self.cache.is_updated[block.index] = True
        return update_cache(cache, *self._project(block), block.index)

    def _project(self, block: LazyBlock) -> tuple[Tensor, Tensor]:
        key, value = block.cross_kv_proj(self.states).chunk(2, -1)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)


class PaddedContext:
    """Attention among all tokens of a padded batch, rows `[B, T, D]`.

    Args:
        num_heads: Number of attention heads.
        mask: Added to the attention scores.
        causal: Use torch's own causal mask, which needs no memory.
        cache: Keys and values of earlier tokens.
        memory: The encoder's output, for a decoder.
    """

    def __init__(
        self,
        num_heads: int,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: Cache | None = None,
        memory: EncoderMemory | None = None,
    ) -> None:
        self.num_heads, self.mask, self.causal = num_heads, mask, causal
        self.cache = self_attention_cache(cache)
        self.memory = memory

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        """Attend to the tokens of the same sequence, those in the cache included."""
        query, key, value = (split_heads(part, self.num_heads) for part in (query, key, value))
        if self.cache is not None:
            key, value = update_cache(self.cache, key, value, step)
        attended = F.scaled_dot_product_attention(
            query, key, value, self.mask, is_causal=self.causal
        )
        return join_heads(attended)

    def cross_attention(self, query: Tensor, block: LazyBlock) -> Tensor:
        """Attend to the encoder's output."""
        assert self.memory is not None
        key, value = self.memory.keys_values(block)
        query = split_heads(query, self.num_heads)
        return join_heads(F.scaled_dot_product_attention(query, key, value, self.memory.mask))


def split_heads(rows_BTD: Tensor, num_heads: int) -> Tensor:
    """Return a view `[B, H, T, D/H]`."""
    return rows_BTD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """Return `[B, T, D]` from `[B, H, T, D/H]`."""
    return heads.transpose(1, 2).flatten(2)


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """Return the part of a cache that belongs to self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def update_cache(cache: Cache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Append keys and values to a cache layer and return all that it holds."""
    # generate() makes as many layers as the config has steps; a call may ask for more.
    while len(cache.layers) <= layer:
        cache.layers.append(DynamicLayer())
    updated: tuple[Tensor, Tensor] = cache.update(key, value, layer)
    return updated


def padding_mask(attention_mask_BK: Tensor | None, like: Tensor) -> Tensor | None:
    """Return an additive mask `[B, 1, 1, K]`, or None if there is no padding."""
    if attention_mask_BK is None or bool(attention_mask_BK.all()):
        return None
    return _additive(attention_mask_BK.bool()[:, None, None, :], like)


def causal_mask(attention_mask_BK: Tensor | None, num_new: int, like: Tensor) -> Tensor | None:
    """Return an additive mask `[B, 1, T, K]` for the last `num_new` tokens, None without padding.

    A token always sees itself: a padding token has nothing else to attend to.
    """
    if attention_mask_BK is None or bool(attention_mask_BK.all()):
        return None
    num_keys = attention_mask_BK.shape[1]
    before = _lower_triangle(num_new, num_keys, like.device)
    itself = torch.eye(num_keys, dtype=torch.bool, device=like.device)[-num_new:]
    visible = (attention_mask_BK.bool()[:, None, :] & before) | itself
    return _additive(visible[:, None], like)


def cached_causal_mask(num_new: int, num_keys: int, like: Tensor) -> Tensor | None:
    """Return an additive mask `[T, K]` for new tokens behind cached ones, None for a single one."""
    if num_new == 1:
        return None
    return _additive(_lower_triangle(num_new, num_keys, like.device), like)


def _lower_triangle(num_new: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.ones(num_new, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_new)


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill_(~visible, float("-inf"))


# -- positional encodings --------------------------------------------------------------------------


def sinusoids(num: int, width: int) -> Tensor:
    """Return `[num, width]`: sines in the first half of the channels, cosines in the second."""
    rates = torch.exp(-math.log(LONGEST_WAVE) * torch.arange(0, width, 2) / width)
    angles = torch.arange(num)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class PositionalEncoding(nn.Module):
    """Encodings of positions and, where the config asks for them, of steps.

    Sinusoids as in the Transformer and the Universal Transformer (arXiv 1807.03819, eq. 6 and 7)
    or, for steps, learned vectors. They are added to the block's normalised input at every step:
    added to the state itself they would accumulate where no norm follows each step.
    """

    def __init__(self, config: LazyTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.steps: nn.Embedding | None = None
        if config.step_encoding == "learned":
            self.steps = nn.Embedding(config.max_steps, config.d_model)
        # Not buffers: they follow from the config, and loading a model leaves buffers unfilled.
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def positions(
        self, num_past: int, state_BTD: Tensor, attention_mask_BK: Tensor | None = None
    ) -> Tensor:
        """Return encodings of T tokens that follow `num_past` others.

        The shape is `[T, D]`, or `[B, T, D]` where padding comes first.
        """
        length = state_BTD.shape[1]
        if num_past + length > self.config.max_positions:
            raise UserError(
                f"A sequence of {num_past + length} tokens is longer than the model's "
                f"{self.config.max_positions} positions: cut it, or raise max_positions."
            )
        table = self._table(state_BTD)
        if attention_mask_BK is None or bool(attention_mask_BK[:, 0].all()):
            return table[num_past : num_past + length]
        indices = attention_mask_BK.long().cumsum(1).sub_(1).clamp_(min=0)[:, -length:]
        return table[indices]

    def add_step(self, positions: Tensor, step: int) -> Tensor:
        """Return the position encodings with that of a step added, if the model has step ones."""
        if self.steps is not None:
            return positions + self.steps.weight[step]
        if self.config.step_encoding == "sinusoid":
            return positions + self._table(positions)[step]
        return positions

    def _table(self, like: Tensor) -> Tensor:
        key = (like.device, like.dtype)
        if key not in self._tables:
            num = max(self.config.max_positions, self.config.max_steps)
            self._tables[key] = sinusoids(num, self.config.d_model).to(like)
        return self._tables[key]


# -- block and stack -------------------------------------------------------------------------------


class LazyBlock(nn.Module):
    """Compute what one step would add to every token's state.

    Self-attention, in a decoder cross-attention, and a feed-forward network, each reading the state
    plus what the parts before it would add, through a norm of its own. The result is the sum of
    what they add; the transition around the block decides how much of it is applied. Applied in
    full, this is the usual pre-norm block.
    """

    def __init__(self, config: LazyTransformerConfig, index: int, cross_attention: bool) -> None:
        super().__init__()
        d = config.d_model
        self.index = index
        self.attention_norm = nn.LayerNorm(d)
        self.qkv_proj = nn.Linear(d, 3 * d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        self.has_cross_attention = cross_attention
        if cross_attention:
            self.cross_norm = nn.LayerNorm(d)
            self.cross_q_proj = nn.Linear(d, d, bias=False)
            self.cross_kv_proj = nn.Linear(d, 2 * d, bias=False)
            self.cross_o_proj = nn.Linear(d, d, bias=False)
        self.ff_norm = nn.LayerNorm(d)
        self.ff_in = nn.Linear(d, config.d_ff)
        self.ff_out = nn.Linear(config.d_ff, d)
        self.ff_dropout = Dropout(config.ff_dropout)

    def forward(
        self, state: Tensor, encoding: Tensor, context: AttentionContext, step: int
    ) -> Tensor:
        """Return the update of every token, the residual not added."""
        query, key, value = self.qkv_proj(self.attention_norm(state) + encoding).chunk(3, -1)
        update: Tensor = self.o_proj(context.self_attention(query, key, value, step))
        if self.has_cross_attention:
            query = self.cross_q_proj(self.cross_norm(state + update))
            update = update + self.cross_o_proj(context.cross_attention(query, self))
        inner = F.relu(self.ff_in(self.ff_norm(state + update)), inplace=True)
        return update + self.ff_out(self.ff_dropout(inner))


class StackOutput(NamedTuple):
    """Result of all steps of a stack."""

    state: Tensor
    """`[B, T, D]`, after the final norm."""
    gates: Tensor | None
    """`[B, T, N]`, of lazy models in evaluation; 0 where a token had halted."""
    ran: Tensor
    """`[B, T, N]`, which steps were computed for which token."""
    depth: Tensor
    """`[B, T]`, after how many steps a token halted."""
    states: tuple[Tensor, ...] | None
    """The states before the first and after every step, where they were asked for."""
    ponder_cost: Tensor | None
    """`[B, T]`, ACT's `N + R`."""


class StepStack(nn.Module):
    """Apply one block repeatedly or, for the mechanism `transformer`, several in turn."""

    def __init__(
        self, config: LazyTransformerConfig, num_steps: int, cross_attention: bool
    ) -> None:
        super().__init__()
        self.config = config
        num_blocks = num_steps if config.mechanism == TRANSFORMER else 1
        self.transitions = nn.ModuleList(
            LazyTransition(
                LazyBlock(config, index, cross_attention),
                norm=nn.LayerNorm(config.d_model) if config.norm == "every" else None,
                dropout=config.dropout,
                lazy=config.mechanism == LAZY,
                compare=config.compare,
            )
            for index in range(num_blocks)
        )
        self.encoding = PositionalEncoding(config)
        self.norm = nn.LayerNorm(config.d_model)
        self.halting = nn.Linear(config.d_model, 1) if config.mechanism == ACT else None

    def forward(
        self,
        state: Tensor,
        positions: Tensor,
        context: AttentionContext,
        num_steps: int,
        keep_states: bool = False,
    ) -> StackOutput:
        """Apply all steps to all tokens.

        Args:
            state: `[B, T, D]`, the embeddings.
            positions: Position encodings, `[T, D]` or `[B, T, D]`.
            context: What the tokens attend to.
            num_steps: How many steps to make.
            keep_states: Whether to return the states of every step.
        """
        self.check_steps(num_steps)
        gates: list[Tensor] = []
        states = [state]
        noise = self._embedding_noise(state)
        for step in range(num_steps):
            encoding = self.encoding.add_step(positions, step)
            state, gate, noise = self.transition(step).step(
                state, encoding, context, step, noise=noise
            )
            gates.append(gate)
            if keep_states or self.halting is not None:
                states.append(state)
        ran = torch.ones((), dtype=torch.bool, device=state.device)
        depth = torch.tensor(num_steps, device=state.device).expand(state.shape[:2])
        cost = None
        if self.halting is not None:
            state, depth, cost = self._halt(states[1:])
        has_gates = self.config.mechanism == LAZY and not self.training
        return StackOutput(
            self.norm(state),
            torch.stack(gates, -1) if has_gates else None,
            ran.expand(*state.shape[:2], num_steps),
            depth,
            tuple(states) if keep_states else None,
            cost,
        )

    def transition(self, step: int) -> LazyTransition:
        """Return the transition that makes a step."""
        found = self.transitions[step if self.config.mechanism == TRANSFORMER else 0]
        assert isinstance(found, LazyTransition)
        return found

    def check_steps(self, num_steps: int, name: str = "The number of steps") -> None:
        """Raise UserError if the stack cannot make so many steps."""
        self.config.check_steps(num_steps, name)
        if self.config.mechanism == TRANSFORMER and num_steps > len(self.transitions):
            raise UserError(
                f"{num_steps} steps were asked for, but this Transformer shares no block and has "
                f"{len(self.transitions)}: ask for as many or fewer."
            )

    def _embedding_noise(self, state: Tensor) -> Tensor | None:
        """Return the noise that dropout put into the embeddings, if gates are to be freed of it."""
        if self.training and self.config.clean_gates and self.config.mechanism == LAZY:
            return dropout_noise(state, self.config.dropout)
        return None

    def _halt(self, states: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ACT's mean state, number of steps and cost, per token."""
        assert self.halting is not None
        each = torch.stack(states, 2)  # [B, T, N, D]
        halting = act_halting(self.halting(each).squeeze(-1).flatten(0, 1))
        shape = each.shape[:2]
        weights = halting.weights.view(*shape, 1, -1)
        state = (weights @ each).squeeze(2)
        return state, halting.passes.view(shape), halting.cost.view(shape)


# -- loss ------------------------------------------------------------------------------------------


def smoothed_cross_entropy(
    logits_RV: Tensor, targets_R: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the mean label-smoothed loss, and the mean plain one without a gradient.

    With a share `s` of the target's probability spread over all `V` tokens, target included,

        loss = logsumexp(z) - (1 - s) * z_target - s * mean(z)
        d loss / d z = softmax(z) - (1 - s) * onehot(target) - s / V

    as `torch.nn.functional.cross_entropy(..., label_smoothing=s)`, which holds several tensors of
    the logits' size at once; here the gradient is computed in one.
    """
    logits = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    smoothed, plain = _SmoothedCrossEntropy.apply(logits, targets_R, smoothing)
    return smoothed, plain


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1)
        picked = logits.gather(1, targets[:, None]).squeeze(1)
        plain = (total - picked).mean()
        smoothed = (1.0 - smoothing) * plain
        if smoothing:
            smoothed += smoothing * (total.mean() - logits.mean())
        ctx.save_for_backward(logits, total, targets)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(plain)
        return smoothed, plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, total, targets = ctx.saved_tensors
        num_rows, vocab_size = logits.shape
        grad = torch.sub(logits, total[:, None]).exp_()
        if ctx.smoothing:
            grad.sub_(ctx.smoothing / vocab_size)
        rows = torch.arange(num_rows, device=grad.device)
        grad[rows, targets] -= 1.0 - ctx.smoothing
        return grad.mul_(grads[0] / num_rows), None, None
