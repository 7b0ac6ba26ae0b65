"""Equilibrium exit: tokens whose states no longer change halt, and are not computed any further.

The gate of the lazy transition (`1 - sigma`, the share of the update that is applied) measures how
far a token is from equilibrium. Where it has been below `epsilon` for `patience` steps in a row,
the token applies that last update and keeps its state from then on. With `halt_on` "angle" the
angle by which a step has turned the state is measured instead: gates that compare a state with its
update need not fall when states come to rest, as updates may be new and small. The keys and values
that a token had in its last step stay visible to the others.

What is computed afterwards is a flat list of the active tokens: fewer rows in every matrix product
and fewer queries. With `epsilon` 0 no token halts, as no gate and no angle is below 0.

Shapes: B sentences, T tokens, D width, N steps, R active tokens, Q most active tokens of a
sentence, K tokens attended to.
"""

import torch
from torch import Tensor

from deepenough.lazy.config import ANGLE
from deepenough.lazy.layers import PaddedContext, StackOutput, StepOptions, StepStack
from deepenough.lazy.transition import squared_cosine


class ActiveContext(PaddedContext):
    """Attention of active tokens, rows `[R, D]`, to all tokens of their sentences."""

    def __init__(self, batch: PaddedContext, state_BTD: Tensor) -> None:
        super().__init__(batch.num_heads, batch.mask, batch.cache, batch.memory)
        self.keys = torch.zeros_like(state_BTD)
        self.values = torch.zeros_like(state_BTD)

    def set_active(self, rows: Tensor) -> None:
        """From now on compute only these tokens, given as sorted indices of the flattened batch."""
        num_sentences, length, _ = self.keys.shape
        self.rows, self.sentence, self.token = rows, rows // length, rows % length
        counts = torch.bincount(self.sentence, minlength=num_sentences)
        self.shape = num_sentences, int(counts.max())  # [B, Q]
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(rows), device=rows.device) - first[self.sentence]
        self.query_rows = self.sentence * self.shape[1] + rank

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        """Attend to all tokens of the same sentence, halted ones by their last keys and values."""
        self.keys.flatten(0, 1).index_copy_(0, self.rows, key)
        self.values.flatten(0, 1).index_copy_(0, self.rows, value)
        mask = self.mask
        if mask is not None and mask.shape[2] > 1:  # every query has a mask of its own
            visible = mask.expand(self.shape[0], -1, -1, -1)[self.sentence, 0, self.token]
            mask = self._padded(visible).unsqueeze(1)
        return self.attend(query, *self.all_keys_values(self.keys, self.values, step), mask)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return what the active tokens take from the values, `[R, D]`."""
        attended = super().attend(self._padded(query), keys, values, mask)
        return attended.flatten(0, 1).index_select(0, self.query_rows)

    def _padded(self, rows: Tensor) -> Tensor:
        """Return rows of the active tokens sentence by sentence, `[B, Q, ...]`."""
        padded = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return padded.index_copy_(0, self.query_rows, rows).unflatten(0, self.shape)


@torch.no_grad()
def run_with_halting(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: PaddedContext,
    options: StepOptions,
    real_BT: Tensor | None = None,
) -> StackOutput:
    """Apply the steps of a stack with equilibrium exit; padding is never computed.

    For evaluation only, without gradients: rows are written in place. The list of active rows is
    rebuilt only when a token has halted: active states stay in one piece from step to step, and
    are copied back when they halt. `real_BT` says which tokens are not padding, None for all.
    """
    num_steps, epsilon, patience, halt_on, keep_states = options
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
            active, gate, *_ = stack.transition(step).step(before, encoding, context, step)
            gates[step].index_copy_(0, rows, gate)
            ran[step].index_fill_(0, rows, True)
            change = _change(stack, halt_on, before, active, gate)
            num_calm = torch.where(change < epsilon, num_calm + 1, 0)
            go_on = (num_calm < patience).nonzero().squeeze(1)
            if len(go_on) < len(rows):
                state.index_copy_(0, rows, active)
                rows, active, encodings, num_calm = (
                    part.index_select(0, go_on) for part in (rows, active, encodings, num_calm)
                )
                if len(rows):
                    context.set_active(rows)
        elif batch.cache is not None:  # later tokens attend to the last keys and values
            context.all_keys_values(context.keys, context.values, step)
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


def _change(
    stack: StepStack, halt_on: str | None, before: Tensor, after: Tensor, gate: Tensor
) -> Tensor:
    """Return what is compared with epsilon: the gate, or the squared sine of the turn."""
    by_angle = (halt_on or stack.config.halt_on) == ANGLE
    return 1.0 - squared_cosine(before, after) if by_angle else gate


def run_in_full(
    stack: StepStack,
    state_BTD: Tensor,
    positions: Tensor,
    batch: PaddedContext,
    options: StepOptions,
) -> StackOutput:
    """Compute all tokens in every step and put back those that have halted.

    The same result as `run_with_halting`, with gradients and without its savings: for training, so
    that a model learns to do with tokens at rest, and as the reference of tests. In training a
    token halts by how far it would have turned without dropout, as in use.
    """
    num_steps, epsilon, patience, halt_on, _ = options
    stack.check_steps(num_steps)
    context = _FrozenContext(batch.num_heads, batch.mask, batch.cache, batch.memory)
    state, noise = state_BTD, stack.initial_noise(state_BTD)
    is_active = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
    num_calm = torch.zeros(state.shape[:2], dtype=torch.long, device=state.device)
    gates, ran = [], []
    for step in range(num_steps):
        context.is_active = is_active
        encoding = stack.encoding.add_step(positions, step)
        moved, gate, moved_noise, clean = stack.transition(step).step(
            state, encoding, context, step, noise=noise, keep_clean=True
        )
        assert clean is not None
        change = _change(stack, halt_on, state.detach(), clean, gate)
        state = torch.where(is_active[..., None], moved, state)
        if noise is not None and moved_noise is not None:
            noise = torch.where(is_active, moved_noise, noise)
        gates.append(gate * is_active)
        ran.append(is_active)
        num_calm = torch.where(change < epsilon, num_calm + 1, 0)
        is_active = is_active & (num_calm < patience)
    all_ran = torch.stack(ran, -1)
    all_gates = None if stack.training else torch.stack(gates, -1)
    return StackOutput(stack.norm(state), all_gates, all_ran, all_ran.sum(-1), None, None)


class _FrozenContext(PaddedContext):
    """A padded batch in which halted tokens keep their keys and values."""

    is_active: Tensor
    last: tuple[Tensor, Tensor] | None = None

    def self_attention(self, query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if self.last is not None:
            key = torch.where(self.is_active[..., None], key, self.last[0])
            value = torch.where(self.is_active[..., None], value, self.last[1])
        self.last = key, value
        return super().self_attention(query, key, value, step)
