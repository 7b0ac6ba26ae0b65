"""Equilibrium exit: tokens whose states no longer change stop, and nothing more is spent on them.

The gate of the lazy transition (`1 - sigma`, the share of the update that is made) measures how far
a token is from equilibrium. Where it has been below `epsilon` for `patience` steps in a row, the
token makes that last update and then stays as it is (with `rest` "turn", where the state itself has
turned by less: gates that compare a state with its update need not fall when states come to rest,
as updates may go on to be new and be small); the keys and values it had in its last step
stay for the others to see. What is computed afterwards is a list of the tokens that still move:
fewer rows in every matrix product, fewer queries, and for a sentence without any nothing at all.
With `epsilon` 0 no token stops, as no gate and no turn is below 0.

Shapes: B sentences, T tokens, D width, N steps, R tokens that still move, K tokens seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepenough.lazy.config import TURN
from deepenough.lazy.sight import (
    BatchSight,
    SourceMaps,
    attend,
    join_heads,
    split_heads,
    update_cache,
)
from deepenough.lazy.stack import Steps, StepStack
from deepenough.lazy.transition import squared_cosine, turned


class MovingSight:
    """Attention of the tokens that still move, rows `[R, D]`, to all tokens of their sentences."""

    def __init__(self, batch: BatchSight, state_BTD: Tensor) -> None:
        self.batch = batch
        self.shape = state_BTD.shape
        self.keys = torch.zeros_like(state_BTD)
        self.values = torch.zeros_like(state_BTD)
        self.mask = _full_mask(batch, state_BTD)
        # Sentences are let go when they have stopped, but for a cache, which keeps all of them.
        self.kept = torch.arange(self.shape[0], device=state_BTD.device)

    def move(self, rows: Tensor) -> None:
        """From now on only these tokens move, given as places in the flattened batch, sorted."""
        length = self.shape[1]
        sentence, self.token = rows // length, rows % length
        if self.batch.cache is None:
            moving = sentence.unique_consecutive()
            if len(moving) < len(self.kept):
                self._keep(moving)
        self.sentence = torch.searchsorted(self.kept, sentence)
        counts = torch.bincount(self.sentence, minlength=len(self.kept))
        self.num_queries = int(counts.max())
        first = counts.cumsum(0) - counts
        place = torch.arange(len(rows), device=rows.device) - first[self.sentence]
        # Where a row stands among the keys, and among the queries, which have no gaps in a sentence
        self.key_row = self.sentence * length + self.token
        self.query_row = self.sentence * self.num_queries + place
        # Nothing to put in its place: the rows are a padded batch as they are.
        self.is_whole = len(rows) == len(self.kept) * length

    def _keep(self, sentences: Tensor) -> None:
        chosen = torch.searchsorted(self.kept, sentences)
        self.keys, self.values = self.keys[chosen], self.values[chosen]
        if self.mask is not None and len(self.mask) > 1:
            self.mask = self.mask[chosen]
        self.kept = sentences

    def own(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if self.is_whole:
            self.keys, self.values = (
                part.unflatten(0, (len(self.kept), -1)) for part in (key, value)
            )
        else:
            self.keys.flatten(0, 1).index_copy_(0, self.key_row, key)
            self.values.flatten(0, 1).index_copy_(0, self.key_row, value)
        keys, values = self._own_heads(step)
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:  # a mask of every query's own
            seen = mask.expand(len(self.kept), -1, -1, -1)[self.sentence, 0, self.token]
            mask = mask.new_zeros(len(self.kept), self.num_queries, mask.shape[3])
            mask = mask.flatten(0, 1).index_copy_(0, self.query_row, seen).view_as(mask)[:, None]
        return self._attend(query, keys, values, mask)

    def source(self, query: Tensor, maps: SourceMaps) -> Tensor:
        source = self.batch.source_of
        assert source is not None
        keys, values = source.keys_values(maps)
        mask = source.mask
        if len(self.kept) < self.shape[0]:
            keys, values = keys[self.kept], values[self.kept]
            mask = None if mask is None else mask[self.kept]
        return self._attend(query, keys, values, mask)

    def rest(self, step: int) -> None:
        """Keys and values of a step that no token makes, for tokens to come."""
        if self.batch.cache is not None:
            self._own_heads(step)

    def _own_heads(self, step: int) -> tuple[Tensor, Tensor]:
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
        seen = join_heads(attend(heads, keys, values, mask)).flatten(0, 1)
        return seen if self.is_whole else seen.index_select(0, self.query_row)


@torch.no_grad()
def run_moving(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: BatchSight,
    num_steps: int,
    epsilon: float,
    patience: int,
    real_BT: Tensor | None = None,
    keep_states: bool = False,
) -> Steps:
    """The steps of a stack with equilibrium exit; of padding (not `real_BT`) nothing is computed.

    For evaluation, without gradients: rows are written in place.

    A list of rows is made anew only when a token has stopped: what moves is kept in one piece from
    step to step, and is put back to its place when it has stopped.
    """
    stack.check(num_steps)
    shape = state_BTD.shape[:2]
    sight = MovingSight(batch, state_BTD)
    state = state_BTD.flatten(0, 1).clone()
    signals = positions.expand_as(state_BTD).flatten(0, 1)
    rows = torch.arange(len(state), device=state.device)
    if real_BT is not None:
        rows = rows[real_BT.flatten().bool()]
    gates = state.new_zeros(num_steps, len(state))
    ran = torch.zeros(num_steps, len(state), dtype=torch.bool, device=state.device)
    moving, signals = state[rows], signals[rows]
    calm = torch.zeros_like(rows)
    states = [state_BTD]
    if len(rows):
        sight.move(rows)
    for step in range(num_steps):
        if len(rows):
            signal = stack.signal(signals, step)
            before = moving
            moving, gate, _ = stack.transition(step).step(before, signal, sight, step)
            gates[step].index_copy_(0, rows, gate)
            ran[step].index_fill_(0, rows, True)
            unrest = turned(before, moving) if stack.config.rest == TURN else gate
            calm = torch.where(unrest < epsilon, calm + 1, 0)
            go_on = (calm < patience).nonzero().squeeze(1)
            if len(go_on) < len(rows):
                state.index_copy_(0, rows, moving)
                rows, moving, signals, calm = (
                    part.index_select(0, go_on) for part in (rows, moving, signals, calm)
                )
                if len(rows):
                    sight.move(rows)
        else:
            sight.rest(step)
        if keep_states:
            states.append(state.index_copy(0, rows, moving).view_as(state_BTD))
    state.index_copy_(0, rows, moving)
    return Steps(
        stack.norm(state.view_as(state_BTD)),
        gates.T.unflatten(0, shape),
        ran.T.unflatten(0, shape),
        ran.sum(0).view(shape),
        tuple(states) if keep_states else None,
        None,
    )


def run_moving_ref(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: BatchSight,
    num_steps: int,
    epsilon: float,
    patience: int,
) -> Steps:
    """The same with all tokens computed in every step, and what has stopped put back."""
    sight = _HoldingSight(batch)
    state = state_BTD
    moving = torch.ones(state.shape[:2], dtype=torch.bool)
    calm = torch.zeros(state.shape[:2], dtype=torch.long)
    gates, ran = [], []
    for step in range(num_steps):
        sight.moving = moving
        signal = stack.signal(positions, step)
        moved, gate, _ = stack.transition(step).step(state, signal, sight, step)
        unrest = 1.0 - squared_cosine(state, moved) if stack.config.rest == TURN else gate
        state = torch.where(moving[..., None], moved, state)
        gates.append(gate * moving)
        ran.append(moving)
        calm = torch.where(unrest < epsilon, calm + 1, 0)
        moving = moving & (calm < patience)
    all_ran = torch.stack(ran, -1)
    normed = stack.norm(state)
    return Steps(normed, torch.stack(gates, -1), all_ran, all_ran.sum(-1), None, None)


class _HoldingSight:
    """A batch's sight in which the keys and values of tokens that stopped stay as they are."""

    def __init__(self, batch: BatchSight) -> None:
        self.batch = batch
        self.moving = torch.tensor(True)
        self.held: tuple[Tensor, Tensor] | None = None

    def own(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if self.held is not None:
            key = torch.where(self.moving[..., None], key, self.held[0])
            value = torch.where(self.moving[..., None], value, self.held[1])
        self.held = key, value
        return self.batch.own(query, key, value, step)

    def source(self, query: Tensor, maps: SourceMaps) -> Tensor:
        return self.batch.source(query, maps)


def _full_mask(batch: BatchSight, state_BTD: Tensor) -> Tensor | None:
    """The batch's mask with four axes, also where torch would have made a causal one itself."""
    if batch.causal:
        length = state_BTD.shape[1]
        later = torch.full((length, length), float("-inf"), device=state_BTD.device).triu(1)
        return later.to(state_BTD.dtype)[None, None]
    mask = batch.mask
    return mask[None, None] if mask is not None and mask.dim() == 2 else mask
