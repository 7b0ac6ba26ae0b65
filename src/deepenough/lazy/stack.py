"""Steps: one block applied again and again, or, for the ordinary Transformer, one after another.

`transformer` and `universal` make every update whole; `lazy` makes the share that is news; `act`
makes them whole and takes as result the mean of all steps' states weighted by Adaptive Computation
Time per token (arXiv 1807.03819, section 2.2, and 1603.08983). As in its source, ACT saves nothing:
tokens that have halted go on for the others to look at.

Shapes: B sentences, T tokens, D width, N steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.lazy.block import Block
from deepenough.lazy.config import ACT, LAZY, TRANSFORMER, LazyTransformerConfig
from deepenough.lazy.sight import Sight
from deepenough.lazy.signals import Signals
from deepenough.lazy.transition import LazyTransition, dropout_noise
from deepenough.nn.adaptive_computation_time import act_halting


class Steps(NamedTuple):
    """What the steps made of the tokens."""

    state: Tensor
    """`[B, T, D]`, behind the last norm."""
    gates: Tensor | None
    """`[B, T, N]`, of lazy models in evaluation; 0 where a token had stopped."""
    ran: Tensor
    """`[B, T, N]`, which steps were computed for which token."""
    depth: Tensor
    """`[B, T]`, after how many steps a token stopped."""
    states: tuple[Tensor, ...] | None
    """The state before the first and after every step, where they are asked for."""
    ponder_cost: Tensor | None
    """`[B, T]`, ACT's `N + R`."""


class StepStack(nn.Module):
    def __init__(self, config: LazyTransformerConfig, num_steps: int, with_source: bool) -> None:
        super().__init__()
        self.config = config
        self.with_source = with_source
        num_blocks = num_steps if config.mechanism == TRANSFORMER else 1
        self.transitions = nn.ModuleList(
            LazyTransition(
                Block(config, index, with_source),
                norm=nn.LayerNorm(config.d_model) if config.norm == "every" else None,
                dropout=config.dropout,
                lazy=config.mechanism == LAZY,
                compare=config.compare,
            )
            for index in range(num_blocks)
        )
        self.signals = Signals(config)
        self.norm = nn.LayerNorm(config.d_model)
        self.halting = nn.Linear(config.d_model, 1) if config.mechanism == ACT else None

    def forward(
        self,
        state: Tensor,
        positions: Tensor,
        sight: Sight,
        num_steps: int,
        keep_states: bool = False,
    ) -> Steps:
        """`positions` is the signal of the tokens' places, `[T, D]` or `[B, T, D]`."""
        self.check(num_steps)
        gates: list[Tensor] = []
        states = [state]
        noise = self._noise(state)
        for step in range(num_steps):
            state, gate, noise = self.transition(step).step(
                state, self.signal(positions, step), sight, step, noise=noise
            )
            gates.append(gate)
            if keep_states or self.halting is not None:
                states.append(state)
        ran = torch.ones((), dtype=torch.bool, device=state.device)
        depth = torch.tensor(num_steps, device=state.device).expand(state.shape[:2])
        cost = None
        if self.halting is not None:
            state, depth, cost = self._halt(states[1:])
        lazy = self.config.mechanism == LAZY and not self.training
        return Steps(
            self.norm(state),
            torch.stack(gates, -1) if lazy else None,
            ran.expand(*state.shape[:2], num_steps),
            depth,
            tuple(states) if keep_states else None,
            cost,
        )

    def _noise(self, state: Tensor) -> Tensor | None:
        """Of the dropout of embeddings, where gates are to be freed of it."""
        if self.training and self.config.clean_gates and self.config.mechanism == LAZY:
            return dropout_noise(state, self.config.dropout)
        return None

    def transition(self, step: int) -> LazyTransition:
        found = self.transitions[step if self.config.mechanism == TRANSFORMER else 0]
        assert isinstance(found, LazyTransition)
        return found

    def signal(self, positions: Tensor, step: int) -> Tensor:
        of_step = self.signals.step(step, positions)
        return positions if of_step is None else positions + of_step

    def check(self, num_steps: int, name: str = "The number of steps") -> None:
        self.config.check_steps(num_steps, name)
        if self.config.mechanism == TRANSFORMER and num_steps > len(self.transitions):
            raise UserError(
                f"{num_steps} steps were asked for, but this Transformer shares no block and has "
                f"{len(self.transitions)}: ask for as many or fewer."
            )

    def _halt(self, states: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """ACT's mean state, its number of steps and its cost, per token."""
        assert self.halting is not None
        each = torch.stack(states, 2)  # [B, T, N, D]
        halting = act_halting(self.halting(each).squeeze(-1).flatten(0, 1))
        shape = each.shape[:2]
        weights = halting.weights.view(*shape, 1, -1)
        state = (weights @ each).squeeze(2)
        return state, halting.passes.view(shape), halting.cost.view(shape)
