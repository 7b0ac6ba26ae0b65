"""Layers of a Lazy Transformer: attention, positional encodings, the block, the stack, the loss.

A block asks a context for attention and so does not need to know whether its tokens form a padded
batch or a flat list, nor where keys and values are kept. Self-attention keys and values belong to a
step, hence one cache layer per step. Cross-attention keys and values belong to a block, whose
projections they come from: a block that is applied repeatedly computes them once.

A stack applies one block again and again or, for the ordinary Transformer, one block after another.
`transformer` and `universal` apply every update in full; `lazy` applies the share that is new;
`act` applies them in full and returns the mean of all steps' states weighted by Adaptive
Computation Time per token (arXiv 1807.03819, section 2.2, and 1603.08983). As in its source, ACT
saves no compute: tokens that have halted continue so that others can attend to them.

Shapes: B sentences, T new tokens, K tokens attended to, S source tokens, D width, H heads, N
steps, V vocabulary, R predicted tokens.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from deepenough.errors import UserError
from deepenough.lazy.config import ACT, LAZY, TRANSFORMER, LazyTransformerConfig
from deepenough.lazy.transition import LazyTransition, dropout_noise
from deepenough.nn.layers import Dropout, act_halting

LONGEST_WAVE = 10_000.0

# -- attention -------------------------------------------------------------------------------------


class EncoderMemory:
    """The encoder's output as cross-attention keys and values, computed once per block.

    `mask` says which source tokens are visible, `[B, 1, 1, S]`; `cache` has a layer per block.
    """

    def __init__(
        self, states_BSD: Tensor, mask: Tensor | None, num_heads: int, cache: Cache | None = None
    ) -> None:
        self.states, self.mask, self.num_heads = states_BSD, mask, num_heads
        self.cache = DynamicCache() if cache is None else cache
        self.is_cached = self.cache.get_seq_length() > 0
        """Whether an earlier call has left keys and values in the cache."""

    def keys_values(self, block: LazyBlock) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block, `[B, H, S, D/H]` each."""
        if self.cache.get_seq_length(block.index) == 0:
            key, value = block.cross_kv_proj(self.states).chunk(2, -1)
            heads = split_heads(key, self.num_heads), split_heads(value, self.num_heads)
            return update_cache(self.cache, *heads, block.index)
        layer: Any = self.cache.layers[block.index]
        return layer.keys, layer.values


class PaddedContext:
    """Attention among all tokens of a padded batch, rows `[B, T, D]`.

    `mask` says which tokens are visible, `[1 or B, 1, 1 or T, K]`; `cache` has a layer per step.
    """

    def __init__(
        self,
        num_heads: int,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        memory: EncoderMemory | None = None,
    ) -> None:
        self.num_heads, self.mask, self.cache, self.memory = num_heads, mask, cache, memory

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        """Attend to the tokens of the same sequence, those in the cache included."""
        return self.attend(query, *self.all_keys_values(key, value, step), self.mask)

    def cross_attention(self, query: Tensor, block: LazyBlock) -> Tensor:
        """Attend to the encoder's output through the block's own key and value projection."""
        assert self.memory is not None
        return self.attend(query, *self.memory.keys_values(block), self.memory.mask)

    def all_keys_values(self, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of cached and new tokens, `[B, H, K, D/H]` each."""
        key, value = split_heads(key, self.num_heads), split_heads(value, self.num_heads)
        return (key, value) if self.cache is None else update_cache(self.cache, key, value, step)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the rows of `query` take from the values, in the form of the rows."""
        heads = split_heads(query, self.num_heads)
        return F.scaled_dot_product_attention(heads, keys, values, mask).transpose(1, 2).flatten(2)


def split_heads(rows_BTD: Tensor, num_heads: int) -> Tensor:
    """Return a view `[B, H, T, D/H]`."""
    return rows_BTD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def update_cache(cache: Cache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Append keys and values to a cache layer and return all that it holds."""
    # generate() makes as many layers as the config has steps; a call may ask for more.
    while len(cache.layers) <= layer:
        cache.layers.append(DynamicLayer())
    updated: tuple[Tensor, Tensor] = cache.update(key, value, layer)
    return updated


def _is_known_whole(mask: Tensor) -> bool:
    """Return whether a mask hides nothing; looking would make a device wait at every token."""
    return mask.device.type == "cpu" and bool(mask.all())


def padding_mask(attention_mask_BK: Tensor | None) -> Tensor | None:
    """Return which tokens are visible, `[B, 1, 1, K]`; None if it is known that all are."""
    if attention_mask_BK is None or _is_known_whole(attention_mask_BK):
        return None
    return attention_mask_BK.bool()[:, None, None, :]


def causal_mask(
    attention_mask_BK: Tensor | None, num_new: int, num_keys: int, device: torch.device
) -> Tensor | None:
    """Return which tokens the last `num_new` see, `[1 or B, 1, T, K]`; None if they see all.

    A token always sees itself: a padding token has nothing else to attend to.
    """
    padding = padding_mask(attention_mask_BK)
    if padding is None and num_new == 1:
        return None
    itself = torch.eye(num_keys, dtype=torch.bool, device=device)[-num_new:]
    earlier = torch.ones_like(itself).tril(num_keys - num_new)
    return earlier[None, None] if padding is None else (padding & earlier) | itself


# -- positional encodings --------------------------------------------------------------------------


@functools.lru_cache(8)
def sinusoids(num: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `[num, width]`: sines in the first half of the channels, cosines in the second."""
    rates = torch.exp(-math.log(LONGEST_WAVE) * torch.arange(0, width, 2) / width)
    angles = torch.arange(num)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1).to(device, dtype)


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

    def positions(
        self, num_past: int, state_BTD: Tensor, attention_mask_BK: Tensor | None = None
    ) -> Tensor:
        """Return encodings of T tokens that follow `num_past` others.

        The shape is `[T, D]`, or `[B, T, D]` where padding comes first.
        """
        length, limit = state_BTD.shape[1], self.config.max_positions
        if num_past + length > limit:
            raise UserError(
                f"A sequence of {num_past + length} tokens is longer than the model's {limit} "
                "positions: cut it, or raise max_positions."
            )
        table = self._table(limit, state_BTD)
        if attention_mask_BK is None or _is_known_whole(attention_mask_BK[:, 0]):
            return table[num_past : num_past + length]
        indices = attention_mask_BK.long().cumsum(1).sub_(1).clamp_(min=0)[:, -length:]
        return table[indices]

    def add_step(self, positions: Tensor, step: int) -> Tensor:
        """Return the position encodings with that of a step added, if the model has step ones."""
        if self.steps is not None:
            return positions + self.steps.weight[step]
        if self.config.step_encoding == "sinusoid":
            return positions + self._table(self.config.max_steps, positions)[step]
        return positions

    def _table(self, num: int, like: Tensor) -> Tensor:
        return sinusoids(num, self.config.d_model, like.device, like.dtype)


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

    def forward(self, state: Tensor, encoding: Tensor, context: PaddedContext, step: int) -> Tensor:
        """Return the update of every token, the residual not added."""
        query, key, value = self.qkv_proj(self.attention_norm(state) + encoding).chunk(3, -1)
        update: Tensor = self.o_proj(context.self_attention(query, key, value, step))
        if self.has_cross_attention:
            query = self.cross_q_proj(self.cross_norm(state + update))
            update = update + self.cross_o_proj(context.cross_attention(query, self))
        inner = F.relu(self.ff_in(self.ff_norm(state + update)), inplace=True)
        return update + self.ff_out(self.ff_dropout(inner))


class StepOptions(NamedTuple):
    """How the steps of one side are made; None is for what the config says."""

    num_steps: Any
    epsilon: Any = None
    patience: Any = None
    halt_on: str | None = None
    keep_states: bool = False
    """Whether to return the states of every step."""


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
        context: PaddedContext,
        num_steps: int,
        keep_states: bool = False,
    ) -> StackOutput:
        """Apply all steps to all embeddings `[B, T, D]`; positions are `[T, D]` or `[B, T, D]`."""
        self.check_steps(num_steps)
        gates: list[Tensor] = []
        states = [state]
        noise = self.initial_noise(state)
        for step in range(num_steps):
            encoding = self.encoding.add_step(positions, step)
            state, gate, noise, _ = self.transition(step).step(
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

    def initial_noise(self, state: Tensor) -> Tensor | None:
        """Return the noise that dropout of embeddings has left, `[B, T]`, where it is tracked."""
        if self.training and self.config.clean_gates and self.config.mechanism == LAZY:
            return dropout_noise(state, self.config.dropout)
        return None

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

    A share `smoothing` of the target's probability is spread over all V tokens, target included:

        loss = -(1 - smoothing) * log p(target) - smoothing * mean(log p)

    Both follow from one softmax; two calls of `F.cross_entropy` would compute two.
    """
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    log_probs = logits_RV.log_softmax(-1, dtype=dtype)
    plain = F.nll_loss(log_probs, targets_R)
    if not smoothing:
        return plain, plain.detach()
    return (1.0 - smoothing) * plain - smoothing * log_probs.mean(), plain.detach()
