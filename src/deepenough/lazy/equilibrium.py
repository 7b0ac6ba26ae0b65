"""Equilibrium exit: tokens whose states no longer change halt, and are not computed any further.

The gate of the lazy transition (`1 - sigma`, the share of the update that is applied) measures how
far a token is from equilibrium. Where it has been below `epsilon` for `patience` steps in a row,
the token applies that last update and keeps its state from then on. With `halt_on` "angle" the
angle by which a step has turned the state is measured instead: gates that compare a state with its
update need not fall when states come to rest, as updates may be new and small. The keys and values
that a token had in its last step stay visible to the others.

What is computed afterwards is a flat list of the active tokens: fewer rows in every matrix product,
fewer queries, and nothing at all for a sentence without active tokens. With `epsilon` 0 no token
halts, as no gate and no angle is below 0.

Shapes: B sentences, T tokens, D width, N steps, R active tokens, K tokens attended to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepenough.lazy.config import ANGLE
from deepenough.lazy.layers import (
    LazyBlock,
    PaddedContext,
    StackOutput,
    StepStack,
    join_heads,
    split_heads,
    update_cache,
)
from deepenough.lazy.transition import squared_sine


class ActiveContext:
    """Attention of active tokens, rows `[R, D]`, to all tokens of their sentences."""

    def __init__(self, batch: PaddedContext, state_BTD: Tensor) -> None:
        self.batch = batch
        self.shape = state_BTD.shape
        self.keys = torch.zeros_like(state_BTD)
        self.values = torch.zeros_like(state_BTD)
        self.mask = _full_mask(batch, state_BTD)
        # Halted sentences are dropped, except with a cache, which keeps all of them.
        self.kept = torch.arange(self.shape[0], device=state_BTD.device)

    def set_active(self, rows: Tensor) -> None:
        """From now on compute only these tokens, given as sorted indices of the flattened batch."""
        length = self.shape[1]
        sentence, self.token = rows // length, rows % length
        if self.batch.cache is None:
            active = sentence.unique_consecutive()
            if len(active) < len(self.kept):
                self._keep(active)
        self.sentence = torch.searchsorted(self.kept, sentence)
        counts = torch.bincount(self.sentence, minlength=len(self.kept))
        self.num_queries = int(counts.max())
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(rows), device=rows.device) - first[self.sentence]
        # Index of a row among the keys, and among the queries, which have no gaps in a sentence
        self.key_row = self.sentence * length + self.token
        self.query_row = self.sentence * self.num_queries + rank
        # If no token has halted, the rows are a padded batch as they are.
        self.is_whole = len(rows) == len(self.kept) * length

    def _keep(self, sentences: Tensor) -> None:
        chosen = torch.searchsorted(self.kept, sentences)
        self.keys, self.values = self.keys[chosen], self.values[chosen]
        if self.mask is not None and len(self.mask) > 1:
            self.mask = self.mask[chosen]
        self.kept = sentences

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        """Attend to all tokens of the same sentence, halted ones by their last keys and values."""
        if self.is_whole:
            self.keys, self.values = (
                part.unflatten(0, (len(self.kept), -1)) for part in (key, value)
            )
        else:
            self.keys.flatten(0, 1).index_copy_(0, self.key_row, key)
            self.values.flatten(0, 1).index_copy_(0, self.key_row, value)
        keys, values = self._keys_values(step)
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:  # every query has a mask of its own
            visible = mask.expand(len(self.kept), -1, -1, -1)[self.sentence, 0, self.token]
            mask = mask.new_zeros(len(self.kept), self.num_queries, mask.shape[3])
            mask = mask.flatten(0, 1).index_copy_(0, self.query_row, visible).view_as(mask)[:, None]
        return self._attend(query, keys, values, mask)

    def cross_attention(self, query: Tensor, block: LazyBlock) -> Tensor:
        """Attend to the encoder's output."""
        memory = self.batch.memory
        assert memory is not None
        keys, values = memory.keys_values(block)
        mask = memory.mask
        if len(self.kept) < self.shape[0]:
            keys, values = keys[self.kept], values[self.kept]
            mask = None if mask is None else mask[self.kept]
        return self._attend(query, keys, values, mask)

    def fill_cache(self, step: int) -> None:
        """Cache the last keys and values for a step that no token makes, for later tokens."""
        if self.batch.cache is not None:
            self._keys_values(step)

    def _keys_values(self, step: int) -> tuple[Tensor, Tensor]:
        heads = self.batch.num_heads
        keys, values = split_heads(self.keys, heads), split_heads(self.values, heads)
        if self.batch.cache is None:
            return keys, values
        return update_cache(self.batch.cache, keys, values, step)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        shape = (len(self.kept), self.num_queries)
        if self.is_whole:
            queries = query
        else:
            queries = query.new_zeros(shape[0] * shape[1], self.shape[2])
            queries.index_copy_(0, self.query_row, query)
        heads = split_heads(queries.unflatten(0, shape), self.batch.num_heads)
        rows = join_heads(F.scaled_dot_product_attention(heads, keys, values, mask)).flatten(0, 1)
        return rows if self.is_whole else rows.index_select(0, self.query_row)


@torch.no_grad()
def run_with_halting(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: PaddedContext,
    num_steps: int,
    epsilon: float,
    patience: int,
    real_BT: Tensor | None = None,
    keep_states: bool = False,
) -> StackOutput:
    """Apply the steps of a stack with equilibrium exit; padding is never computed.

    For evaluation only, without gradients: rows are written in place. The list of active rows is
    rebuilt only when a token has halted: active states stay in one piece from step to step, and
    are copied back when they halt.

    Args:
        stack: The stack whose steps are made.
        state_BTD: The embeddings.
        positions: Position encodings, `[T, D]` or `[B, T, D]`.
        batch: What the tokens attend to.
        num_steps: Most steps of a token.
        epsilon: Gate (or angle) below which a token is in equilibrium.
        patience: Steps in a row for which it must be.
        real_BT: Which tokens are not padding; None if all are real.
        keep_states: Whether to return the states of every step.
    """
    stack.check_steps(num_steps)
    shape = state_BTD.shape[:2]
    context = ActiveContext(batch, state_BTD)
    state = state_BTD.flatten(0, 1).clone()
    encodings = positions.expand_as(state_BTD).flatten(0, 1)
    rows = torch.arange(len(state), device=state.device)
    if real_BT is not None:
        rows = rows[real_BT.flatten().bool()]
    gates = state.new_zeros(num_steps, len(state))
    ran = torch.zeros(num_steps, len(state), dtype=torch.bool, device=state.device)
    active, encodings = state[rows], encodings[rows]
    num_calm = torch.zeros_like(rows)
    states = [state_BTD]
    if len(rows):
        context.set_active(rows)
    for step in range(num_steps):
        if len(rows):
            encoding = stack.encoding.add_step(encodings, step)
            before = active
            active, gate, _ = stack.transition(step).step(before, encoding, context, step)
            gates[step].index_copy_(0, rows, gate)
            ran[step].index_fill_(0, rows, True)
            change = squared_sine(before, active) if stack.config.halt_on == ANGLE else gate
            num_calm = torch.where(change < epsilon, num_calm + 1, 0)
            go_on = (num_calm < patience).nonzero().squeeze(1)
            if len(go_on) < len(rows):
                state.index_copy_(0, rows, active)
                rows, active, encodings, num_calm = (
                    part.index_select(0, go_on) for part in (rows, active, encodings, num_calm)
                )
                if len(rows):
                    context.set_active(rows)
        else:
            context.fill_cache(step)
        if keep_states:
            states.append(state.index_copy(0, rows, active).view_as(state_BTD))
    state.index_copy_(0, rows, active)
    return StackOutput(
        stack.norm(state.view_as(state_BTD)),
        gates.T.unflatten(0, shape),
        ran.T.unflatten(0, shape),
        ran.sum(0).view(shape),
        tuple(states) if keep_states else None,
        None,
    )


def run_with_halting_ref(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: PaddedContext,
    num_steps: int,
    epsilon: float,
    patience: int,
) -> StackOutput:
    """Compute all tokens in every step and put back those that have halted, for tests."""
    context = _FrozenContext(batch)
    state = state_BTD
    is_active = torch.ones(state.shape[:2], dtype=torch.bool)
    num_calm = torch.zeros(state.shape[:2], dtype=torch.long)
    gates, ran = [], []
    for step in range(num_steps):
        context.is_active = is_active
        encoding = stack.encoding.add_step(positions, step)
        moved, gate, _ = stack.transition(step).step(state, encoding, context, step)
        change = squared_sine(state, moved) if stack.config.halt_on == ANGLE else gate
        state = torch.where(is_active[..., None], moved, state)
        gates.append(gate * is_active)
        ran.append(is_active)
        num_calm = torch.where(change < epsilon, num_calm + 1, 0)
        is_active = is_active & (num_calm < patience)
    all_ran = torch.stack(ran, -1)
    normed = stack.norm(state)
    return StackOutput(normed, torch.stack(gates, -1), all_ran, all_ran.sum(-1), None, None)


class _FrozenContext:
    """A padded batch in which halted tokens keep their keys and values."""

    def __init__(self, batch: PaddedContext) -> None:
        self.batch = batch
        self.is_active = torch.tensor(True)
        self.last: tuple[Tensor, Tensor] | None = None

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if self.last is not None:
            key = torch.where(self.is_active[..., None], key, self.last[0])
            value = torch.where(self.is_active[..., None], value, self.last[1])
        self.last = key, value
        return self.batch.self_attention(query, key, value, step)

    def cross_attention(self, query: Tensor, block: LazyBlock) -> Tensor:
        return self.batch.cross_attention(query, block)


def _full_mask(batch: PaddedContext, state_BTD: Tensor) -> Tensor | None:
    """Return the batch's mask with four axes, also where torch would apply a causal one itself."""
    if batch.causal:
        length = state_BTD.shape[1]
        later = torch.full((length, length), float("-inf"), device=state_BTD.device).triu(1)
        return later.to(state_BTD.dtype)[None, None]
    mask = batch.mask
    return mask[None, None] if mask is not None and mask.dim() == 2 else mask
