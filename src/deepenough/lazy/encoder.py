"""The encoder: source tokens, all of which see one another, updated step by step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.equilibrium import run_moving
from deepenough.lazy.flops import encoder_trace
from deepenough.lazy.output import LazyEncoderOutput
from deepenough.lazy.sight import BatchSight, padding_mask
from deepenough.lazy.stack import StepStack
from deepenough.nn.layers import Dropout


class LazyEncoder(nn.Module):
    main_input_name = "input_ids"

    def __init__(self, config: LazyTransformerConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.dropout = Dropout(config.dropout)
        self.stack = StepStack(config, config.encoder_steps, with_source=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        encoder_steps: int | None = None,
        epsilon: float | None = None,
        patience: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> LazyEncoderOutput | tuple[Any, ...]:
        """Steps, `epsilon` and `patience` are the config's unless they are given."""
        config = self.config
        num_steps = config.encoder_steps if encoder_steps is None else encoder_steps
        epsilon = config.epsilon if epsilon is None else epsilon
        config.check_epsilon(epsilon, "epsilon")
        state = embed(self.embedding, input_ids, self.dropout)
        positions = place_signals(self.stack, attention_mask, 0, state)
        sight = BatchSight(config.num_heads, padding_mask(attention_mask, state))
        keep = bool(output_hidden_states)
        if epsilon > 0.0 and not self.training:
            patience = config.patience if patience is None else patience
            steps = run_moving(
                self.stack, state, positions, sight, num_steps, epsilon, patience,
                attention_mask, keep,
            )  # fmt: skip
        else:
            steps = self.stack(state, positions, sight, num_steps, keep)
        trace = None if self.training else encoder_trace(config, steps, attention_mask)
        output = LazyEncoderOutput(steps.state, steps.states, steps.gates, steps.ponder_cost, trace)
        return output if return_dict is not False else output.to_tuple()


def embed(embedding: nn.Module, ids: Tensor, dropout: nn.Module) -> Tensor:
    """Embeddings of unit variance: the table's is 1 / D, as its use as output layer asks for."""
    vectors = embedding(ids)
    state: Tensor = dropout(vectors * vectors.shape[-1] ** 0.5)
    return state


def place_signals(
    stack: StepStack, attention_mask_BK: Tensor | None, num_past: int, state_BTD: Tensor
) -> Tensor:
    """Position signals of the last tokens, `[T, D]`, or `[B, T, D]` where padding stands first."""
    length = state_BTD.shape[1]
    signals = stack.signals.first_positions(num_past, length, state_BTD)
    if attention_mask_BK is None or bool(attention_mask_BK[:, 0].all()):
        return signals
    places = attention_mask_BK.long().cumsum(1).sub_(1).clamp_(min=0)[:, -length:]
    return stack.signals.positions(places, state_BTD)
