"""Configuration of the PAR Transformer-XL."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from deepenough.errors import UserError
from deepenough.par.pattern import OPEN, check_pattern


class ParConfig(PreTrainedConfig):
    """A Transformer-XL whose blocks are given by `pattern`, or still searched (`*`)."""

    model_type = "par"
    attribute_map = {  # noqa: RUF012 - the form transformers asks for
        "hidden_size": "d_model",
        "num_hidden_layers": "num_blocks",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
    }
    keys_to_ignore_at_inference = ["memories", "past_key_values", "trace"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 8000,
        d_model: int = 128,
        num_heads: int = 4,
        d_ff: int = 512,
        num_blocks: int = 6,
        pattern: str | None = None,
        mem_len: int = 32,
        length: int = 32,
        cutoffs: list[int] | tuple[int, ...] = (),
        div_value: float = 4.0,
        adaptive_input: bool = False,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        straight_through: bool = False,
        learn_tau: bool = False,
        initializer_range: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.pattern = OPEN * num_blocks if pattern is None else pattern
        self.num_blocks = len(self.pattern)
        self.mem_len = mem_len
        self.length = length
        self.cutoffs = [int(cut) for cut in cutoffs]
        self.div_value = div_value
        self.adaptive_input = adaptive_input
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.straight_through = straight_through
        self.learn_tau = learn_tau
        self._check()
        self.initializer_range = initializer_range or d_model**-0.5
        # Without an adaptive softmax the output shares the input's embeddings.
        kwargs.setdefault("tie_word_embeddings", not self.cutoffs)
        super().__init__(**kwargs)

    @property
    def sliding_window(self) -> int:
        """How far back a token sees: the longest reach that training has, memory and segment."""
        return self.mem_len + self.length

    def _check(self) -> None:
        check_pattern(self.pattern, allow_open=True)
        for name in ("vocab_size", "d_model", "num_heads", "d_ff", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}.")
        if self.d_model % self.num_heads:
            raise UserError(
                f"{self.num_heads} heads do not divide the width {self.d_model}: "
                "choose num_heads so that d_model is a multiple of it."
            )
        if self.mem_len < 0:
            raise UserError(f"mem_len must not be negative: got {self.mem_len}.")
        check_cutoffs(self.cutoffs, self.vocab_size)
        if self.adaptive_input and not self.cutoffs:
            raise UserError("Adaptive input embeddings need cutoffs: give cutoffs as well.")
        if self.cutoffs and not 1.0 <= self.div_value ** len(self.cutoffs) <= self.d_model:
            raise UserError(
                f"{len(self.cutoffs)} cutoffs with a div_value of {self.div_value:g} do not fit "
                f"the width {self.d_model}: div_value must be at least 1 and leave the last "
                "cluster a width of at least 1."
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name} must be in [0, 1): got {getattr(self, name)}.")


def with_pattern(config: ParConfig, pattern: str) -> ParConfig:
    """The same config with other blocks."""
    values = config.to_dict()
    for name in ("pattern", "num_blocks", "model_type"):
        values.pop(name, None)
    return ParConfig(**values, pattern=pattern)


def check_cutoffs(cutoffs: list[int], vocab_size: int) -> None:
    if cutoffs != sorted(set(cutoffs)):
        raise UserError(
            f"The cutoffs {cutoffs} are not sorted and distinct: give them in rising order."
        )
    if cutoffs and not (cutoffs[0] > 0 and cutoffs[-1] < vocab_size):
        raise UserError(
            f"The cutoffs {cutoffs} must lie between 1 and {vocab_size - 1}: "
            f"the vocabulary size, {vocab_size}, is not one of them."
        )
