"""Configuration of Lazy Transformers and of the models they are compared with."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from deepenough.errors import UserError
from deepenough.lazy.transition import STATE, UPDATE

LAZY, UNIVERSAL, ACT, TRANSFORMER = "lazy", "universal", "act", "transformer"
MECHANISMS = (LAZY, UNIVERSAL, ACT, TRANSFORMER)
STEP_SIGNALS = ("none", "sinusoid", "learned")
NORMS = ("final", "every")
COMPARED = (UPDATE, STATE)
GATE, TURN = "gate", "turn"
RESTS = (GATE, TURN)
"""What is small where a token is at rest: its gate, or how far a step has turned its state."""
USUAL_EPSILONS = {
    STATE: (0.05, 0.075, 0.1),
    UPDATE: (0.15, 0.2, 0.25),
    TURN: (0.0035, 0.005, 0.008),
}
"""Epsilons with which tokens of trained translators make about 3/4, 3/5 and half of 8 steps."""


class LazyTransformerConfig(PreTrainedConfig):
    """Steps are applications of one block; only `transformer` has a block of its own for each.

    - `mechanism`: `lazy`; `universal`, the plain Universal Transformer (arXiv 1807.03819); `act`,
      the same with Adaptive Computation Time; `transformer`, nothing shared.
    - `compare`: what the gates compare a state with: the `state` that a whole update would make, or
      the `update` itself.
    - `clean_gates`: whether gates are freed of the noise of dropout in training.
    - `norm`: `final`, one norm after the last step; `every`, the paper's, one after each.
    - `step_signal`: whether the block is told which step it makes, up to `max_steps`.
    - `epsilon`, `patience`: a source token whose gate is below `epsilon` for `patience` steps in a
      row stops; 0 lets none stop. `decoder_epsilon` is the same for target tokens.
    - `rest`: `gate`, as above; `turn`, what is below `epsilon` is the squared sine of the angle by
      which a step has turned the state. Both can be changed in a trained model.
    """

    model_type = "lazy-transformer"
    attribute_map = {  # noqa: RUF012 - the form transformers asks for
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_steps",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "max_positions",
    }
    keys_to_ignore_at_inference = ["past_key_values", "trace"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 8000,
        d_model: int = 256,
        num_heads: int = 4,
        d_ff: int = 1024,
        encoder_steps: int = 6,
        decoder_steps: int = 6,
        mechanism: str = LAZY,
        compare: str = STATE,
        norm: str = "final",
        step_signal: str = "none",
        max_steps: int = 64,
        max_positions: int = 1024,
        dropout: float = 0.1,
        ff_dropout: float = 0.0,
        clean_gates: bool = False,
        label_smoothing: float = 0.0,
        act_cost: float = 0.01,
        epsilon: float = 0.0,
        decoder_epsilon: float = 0.0,
        patience: int = 1,
        rest: str = GATE,
        is_encoder_decoder: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.d_model, self.num_heads, self.d_ff = (
            vocab_size,
            d_model,
            num_heads,
            d_ff,
        )
        self.encoder_steps, self.decoder_steps = encoder_steps, decoder_steps
        self.mechanism, self.compare, self.norm = mechanism, compare, norm
        self.step_signal, self.max_steps, self.max_positions = step_signal, max_steps, max_positions
        self.dropout, self.ff_dropout, self.clean_gates = dropout, ff_dropout, clean_gates
        self.label_smoothing, self.act_cost = label_smoothing, act_cost
        self.epsilon, self.decoder_epsilon, self.patience = epsilon, decoder_epsilon, patience
        self.rest = rest
        self._check()
        kwargs.setdefault("tie_word_embeddings", True)
        for name, number in (("bos", 1), ("eos", 2), ("pad", 3)):
            kwargs.setdefault(f"{name}_token_id", number)
        kwargs.setdefault("decoder_start_token_id", kwargs["bos_token_id"])
        super().__init__(is_encoder_decoder=is_encoder_decoder, **kwargs)

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """Itself: transformers' own would rename in a copy what begins with `decoder_`."""
        return self

    @property
    def usual_epsilons(self) -> tuple[float, ...]:
        """Epsilons to begin with, from careful to bold; none for a model without gates."""
        if self.mechanism != LAZY:
            return ()
        return USUAL_EPSILONS[TURN if self.rest == TURN else self.compare]

    def _check(self) -> None:
        for name, choices in (
            ("mechanism", MECHANISMS),
            ("compare", COMPARED),
            ("norm", NORMS),
            ("rest", RESTS),
            ("step_signal", STEP_SIGNALS),
        ):
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise UserError(f"{name} is one of {', '.join(choices)}: got {given!r}.")
        for name in (
            "vocab_size",
            "d_model",
            "num_heads",
            "d_ff",
            "max_steps",
            "max_positions",
            "patience",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}.")
        if self.d_model % self.num_heads or self.d_model % 2:
            raise UserError(
                f"The width {self.d_model} must be even and a multiple of the {self.num_heads} "
                "heads: choose another d_model or num_heads."
            )
        for name in ("dropout", "ff_dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name} must be in [0, 1): got {getattr(self, name)}.")
        for name in ("encoder_steps", "decoder_steps"):
            self.check_steps(getattr(self, name), name)
        for name in ("epsilon", "decoder_epsilon"):
            self.check_epsilon(getattr(self, name), name)

    def check_steps(self, steps: int, name: str) -> None:
        """Refuse a number of steps that the model cannot make."""
        if steps < 1:
            raise UserError(f"{name} must be at least 1: got {steps}.")
        if self.step_signal != "none" and steps > self.max_steps:
            raise UserError(
                f"{name} is {steps}, but the step signal of this model reaches {self.max_steps} "
                "steps: ask for fewer, or raise max_steps before training."
            )

    def check_epsilon(self, epsilon: float, name: str) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise UserError(f"{name} must be in [0, 1], as gates and turns are: got {epsilon}.")
        if epsilon > 0.0 and self.mechanism != LAZY:
            raise UserError(
                f"Only lazy models have gates that can reach equilibrium: leave {name} at 0 for "
                f"the mechanism {self.mechanism}."
            )
