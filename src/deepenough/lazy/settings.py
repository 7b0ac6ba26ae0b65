"""Options of a Lazy Transformer that is to be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class LazySettings:
    """Model"""

    mechanism: Literal["lazy", "universal", "act", "transformer"] = "lazy"
    """lazy; universal, the plain Universal Transformer; act, the same with Adaptive Computation
    Time; transformer, with a block of its own for every step."""

    d_model: int = 256
    """Width of the states."""

    num_heads: int = 4
    """Attention heads."""

    d_ff: int = 1024
    """Width inside the feed-forward network."""

    encoder_steps: int = 6
    """Steps over the source."""

    decoder_steps: int = 4
    """Steps over the translation."""

    compare: Literal["state", "update"] = "state"
    """What gates compare a state with: the state that a whole update would make, or the update."""

    norm: Literal["final", "every"] = "final"
    """Norm after the last step, or after every step as in the paper."""

    step_signal: Literal["none", "sinusoid", "learned"] = "none"
    """Whether, and how, the block is told which step it makes. Without, it can make any number."""

    max_steps: int = 64
    """Steps that a step signal reaches."""

    dropout: float = 0.2
    """Of embeddings and updates, in training."""

    ff_dropout: float = 0.1
    """Inside the feed-forward network, in training."""

    clean_gates: bool = False
    """Take the noise of dropout out of the gates in training, so that they are those of use."""

    label_smoothing: float = 0.1
    """Share of the target's probability that is spread over all words in training."""

    act_cost: float = 0.01
    """What a step of a token costs Adaptive Computation Time, tau."""

    epsilon: float = 0.0
    """Gate (or turn, see rest) below which a source token stops being updated, outside training;
    0 lets none stop."""

    decoder_epsilon: float = 0.0
    """The same for tokens of the translation."""

    patience: int = 1
    """Steps in a row for which it must be below."""

    rest: Literal["gate", "turn"] = "gate"
    """What must be below epsilon: the gate, or how far a step has turned the state (the squared
    sine of the angle)."""
