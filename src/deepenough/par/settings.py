"""Settings of the PAR model and of the search for its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deepenough.errors import UserError
from deepenough.par.config import ParConfig


@dataclass
class ModelSettings:
    """Model"""

    pattern: str | None = None
    """Blocks: a attention, d dense, - identity, such as adadad; a search leaves it open."""

    num_blocks: int = 6
    """Number of blocks of a search."""

    d_model: int = 128
    """Width of the hidden states."""

    num_heads: int = 4
    """Attention heads."""

    d_ff: int = 512
    """Inner width of dense blocks."""

    mem_len: int = 32
    """Earlier positions that attention sees beyond the segment."""

    cutoffs: list[int] = field(default_factory=list)
    """Cutoffs of the adaptive softmax, without the vocabulary size; none for an output layer tied
    to the embeddings."""

    div_value: float = 4.0
    """By how much each further cluster of the adaptive softmax is narrower."""

    adaptive_input: bool = False
    """Give the input embeddings the same clusters."""

    dropout: float = 0.1
    """Dropout on embeddings and on the output of every branch."""

    attention_dropout: float = 0.0
    """Dropout on attention weights."""

    initializer_range: float | None = None
    """Standard deviation of new linear weights; by default the inverse root of the width."""

    def config(
        self, vocab_size: int, length: int, pattern: str | None, **more: object
    ) -> ParConfig:
        """The model's config for a tokenizer's vocabulary and a segment length."""
        return ParConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            num_blocks=self.num_blocks,
            pattern=pattern,
            mem_len=self.mem_len,
            length=length,
            cutoffs=self.cutoffs,
            div_value=self.div_value,
            adaptive_input=self.adaptive_input,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            initializer_range=self.initializer_range,
            **more,  # type: ignore[arg-type]
        )


@dataclass
class SearchSettings:
    """Search"""

    tau: Literal["exponential", "linear", "constant", "learned"] = "exponential"
    """How the temperature of the choice goes from tau_start to tau_end; learned makes it a
    parameter."""

    tau_start: float = 1.0
    """Temperature at the first step."""

    tau_end: float = 0.1
    """Temperature at the last step."""

    straight_through: bool = False
    """Use one branch at a time in the forward pass, all of them in the backward pass."""

    optimise: Literal["simultaneous", "alternating"] = "simultaneous"
    """Train weights and choices together, or the choices on held-out training text."""

    held_out: float = 0.2
    """Part of the training text for the choices, when alternating."""

    alternate_every: int = 2
    """Steps of the weights for one of the choices, when alternating."""

    alpha_lr: float = 1.0
    """Learning rate of the choices, as a multiple of the weights'."""

    choose_after: float = 0.0
    """Share of the search before which only weights are trained: attention learns later than dense
    blocks, and a choice made too early goes against it."""

    cost_weight: float = 0.0
    """Weight of the expected cost in the loss; the cost is relative to the interleaved baseline."""

    cost: Literal["latency", "flops"] = "latency"
    """Cost of a block: measured on this machine at the real shape, or counted."""

    cost_length: int | None = None
    """Length of segment and memory for which costs hold, where the model will be used with longer
    ones than it is searched with; by default those of the search."""

    budget: float | None = None
    """Largest cost of the derived pattern, as a share of the interleaved baseline's."""

    budget_weight: float = 0.0
    """Weight in the loss of the squared excess of the expected cost over the budget: blocks then
    compete for the budget while they learn, instead of being cut to it at the end."""

    spend: float = 0.0
    """Least share of the budget that the derived pattern uses: a short search undervalues
    attention."""

    decide_at: float = 1.0
    """Close a block once a branch has this probability: its other branch is computed no more."""

    decide_after: float = 0.05
    """Share of the search before which no block is closed."""

    retrain: Literal["none", "scratch", "supernet"] = "none"
    """Train the derived pattern afterwards, from new weights or from the SuperNet's."""

    def check(self) -> None:
        if self.tau_start <= 0 or self.tau_end <= 0:
            raise UserError("search.tau_start and search.tau_end must be above 0.")
        if self.budget is not None and self.budget <= 0:
            raise UserError(f"search.budget must be above 0: got {self.budget}.")
        if self.budget_weight < 0:
            raise UserError(f"search.budget_weight must not be negative: got {self.budget_weight}.")
        if self.budget_weight and self.budget is None:
            raise UserError("search.budget_weight needs a search.budget to keep to.")
        if self.cost_length is not None and self.cost_length < 1:
            raise UserError(f"search.cost_length must be at least 1: got {self.cost_length}.")
        if not 0 <= self.spend <= 1:
            raise UserError(f"search.spend must be from 0 to 1: got {self.spend}.")
        if not 0 < self.held_out < 1:
            raise UserError(f"search.held_out must be between 0 and 1: got {self.held_out}.")
        if self.alternate_every < 1:
            raise UserError(
                f"search.alternate_every must be at least 1: got {self.alternate_every}."
            )
        if not 0 <= self.choose_after < 1:
            raise UserError(f"search.choose_after must be in [0, 1): got {self.choose_after}.")
        if not 0.5 < self.decide_at <= 1:
            raise UserError(f"search.decide_at must be in (0.5, 1]: got {self.decide_at}.")
