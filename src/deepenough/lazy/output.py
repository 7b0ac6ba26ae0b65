"""What Lazy Transformers return.

Shapes: B sentences, S source tokens, T target tokens, D width, N steps, V words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache
from transformers.utils.generic import ModelOutput

from deepenough.trace import DepthTrace


@dataclass
class LazyEncoderOutput(ModelOutput):
    last_hidden_state: Tensor | None = None
    """`[B, S, D]`."""
    hidden_states: tuple[Tensor, ...] | None = None
    """`[B, S, D]` before the first and after every step, before the last norm."""
    gates: Tensor | None = None
    """`[B, S, N]`: share of each step's update that was made, 0 where a token had stopped."""
    ponder_cost: Tensor | None = None
    """`[B, S]`: what ACT's steps cost."""
    trace: DepthTrace | None = None
    """In evaluation, one unit a source token."""


@dataclass
class LazyOutput(ModelOutput):
    loss: Tensor | None = None
    """Mean over target tokens in nats; with smoothed labels in training, if the config says so."""
    logits: Tensor | None = None
    """`[B, T, V]`; left out where only the loss is asked for."""
    plain_loss: Tensor | None = None
    """The loss without smoothing and other terms."""
    past_key_values: Cache | None = None
    memories: None = None
    """Nothing is carried from one segment of a text to the next; language models with memory have
    something here."""
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_gates: Tensor | None = None
    """`[B, T, N]`."""
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_gates: Tensor | None = None
    """`[B, S, N]`."""
    encoder_trace: DepthTrace | None = None
    """One unit a source token."""
    trace: DepthTrace | None = None
    """In evaluation, one unit a target token, the output layer included."""

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """The decoder's, by the name that a language model's have."""
        return self.decoder_hidden_states
