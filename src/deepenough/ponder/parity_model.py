"""The recurrent network of the parity experiment, and three ways to decide how long it runs.

One GRU cell is applied again and again to the same input; after each pass a classifier gives `y_n`
and a halting unit the logit of `lambda_n` (PonderNet, arXiv 2107.05407, section 4.1). Mechanisms:

- `ponder`: PonderNet. Its loss is the expectation over passes; it answers with the pass at which it
  halts, the first one whose cumulative halting probability reaches one half.
- `act`: Adaptive Computation Time; it answers with a weighted mean of passes.
- `fixed`: always all passes; it answers with the last one.

How the vector enters the cell is a choice. `vector` gives it as it is, as the paper does: every
entry has weights of its own, and the network has to find out that entries are alike. `entries`
gives two numbers, the sum of the positive and that of the negative parts of all entries, so that
this is known beforehand and what is left to learn is the procedure itself.

Shapes: B inputs, D entries, N passes, H width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from deepenough.errors import UserError
from deepenough.nn.adaptive_computation_time import act_halting
from deepenough.ponder.distribution import check_target, log_halting
from deepenough.ponder.loss import SINGLE_LABEL, PonderLoss, answer_loss, fixed_loss, ponder_loss

MECHANISMS = ("ponder", "act", "fixed")
INPUTS = ("entries", "vector")
NUM_LABELS = 2
HALF = 0.5


class ParityConfig(PreTrainedConfig):
    model_type = "deepenough-parity"

    def __init__(
        self,
        size: int = 16,
        width: int = 64,
        input: str = "entries",
        mechanism: str = "ponder",
        max_passes: int = 20,
        halting_target: float = 0.1,
        kl_weight: float = 0.01,
        act_cost: float = 0.001,
        **kwargs: Any,
    ) -> None:
        """`max_passes` are those of training; `act_cost` is ACT's tau."""
        if mechanism not in MECHANISMS:
            raise UserError(f"The mechanism is one of {', '.join(MECHANISMS)}: got {mechanism!r}.")
        if input not in INPUTS:
            raise UserError(f"The input is one of {', '.join(INPUTS)}: got {input!r}.")
        for name, value in (("size", size), ("width", width), ("max_passes", max_passes)):
            if value < 1:
                raise UserError(f"model.{name} must be at least 1: got {value}.")
        check_target(halting_target)
        super().__init__(**kwargs)
        self.size, self.width, self.input, self.mechanism = size, width, input, mechanism
        self.max_passes, self.halting_target = max_passes, halting_target
        self.kl_weight, self.act_cost = kl_weight, act_cost


class Passes(NamedTuple):
    """What every pass says."""

    logits: Tensor
    """[N, B, 2]."""
    halt_logits: Tensor
    """[B, N], of `lambda_n`."""


class Answer(NamedTuple):
    logits: Tensor
    """[B, 2]."""
    passes: Tensor
    """[B], how many passes were made for each input."""


class ParityModel(PreTrainedModel):
    config_class = ParityConfig
    main_input_name = "vectors"

    def __init__(self, config: ParityConfig) -> None:
        super().__init__(config)
        width = config.width
        self.cell = nn.GRUCell(2 if config.input == "entries" else config.size, width)
        self.classifier = nn.Linear(width, NUM_LABELS)
        self.halt = nn.Linear(width, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """torch's own, but for halting: a new model halts as the prior does."""
        if module is self.halt:
            target = self.config.halting_target
            init.constant_(self.halt.bias, math.log(target) - math.log1p(-target))

    def forward(self, vectors: Tensor, num_passes: int | None = None) -> Passes:
        """All passes, as many as in training unless told otherwise."""
        num_passes = num_passes or self.config.max_passes
        # The input is the same at every pass, and so is its part of the gates.
        gates = nn.functional.linear(self._encode(vectors), self.cell.weight_ih, self.cell.bias_ih)
        input_reset, input_update, input_new = gates.chunk(3, -1)
        hidden = gates.new_zeros(len(vectors), self.config.width)
        states = []
        for _ in range(num_passes):
            own = nn.functional.linear(hidden, self.cell.weight_hh, self.cell.bias_hh)
            own_reset, own_update, own_new = own.chunk(3, -1)
            reset = torch.sigmoid(input_reset + own_reset)
            update = torch.sigmoid(input_update + own_update)
            new = torch.tanh(input_new + reset * own_new)
            hidden = torch.lerp(new, hidden, update)
            states.append(hidden)
        states_NBH = torch.stack(states)
        return Passes(self.classifier(states_NBH), self.halt(states_NBH)[..., 0].T)

    def _encode(self, vectors: Tensor) -> Tensor:
        if self.config.input == "vector":
            return vectors
        parts = torch.stack([vectors.clamp(min=0).sum(-1), -vectors.clamp(max=0).sum(-1)], -1)
        return parts / math.sqrt(self.config.size)

    # -- the three mechanisms ----------------------------------------------------------------

    def loss(self, passes: Passes, labels: Tensor) -> PonderLoss:
        config, logits = self.config, passes.logits
        num_passes = len(logits)
        if config.mechanism == "ponder":
            log_p = log_halting(passes.halt_logits, num_passes)
            return ponder_loss(
                logits, log_p, labels, SINGLE_LABEL, config.halting_target, config.kl_weight
            )
        if config.mechanism == "fixed":
            last = torch.zeros(num_passes)
            last[-1] = 1.0
            return fixed_loss(logits, last, labels, SINGLE_LABEL)
        halting = act_halting(passes.halt_logits)
        answer = torch.einsum("bn,nbc->bc", halting.weights, logits)
        task, cost = answer_loss(answer, labels, SINGLE_LABEL), halting.cost.mean()
        return PonderLoss(task + config.act_cost * cost, task, cost)

    def answer(self, passes: Passes, threshold: float = HALF) -> Answer:
        """What the model says, and after how many passes."""
        logits, num_passes = passes.logits, len(passes.logits)
        if self.config.mechanism == "act":
            halting = act_halting(passes.halt_logits)
            return Answer(torch.einsum("bn,nbc->bc", halting.weights, logits), halting.passes)
        if self.config.mechanism == "fixed":
            return Answer(logits[-1], torch.full_like(passes.halt_logits[:, 0].long(), num_passes))
        reached = log_halting(passes.halt_logits, num_passes).exp().cumsum(-1)
        index = (reached < threshold).sum(-1).clamp(max=num_passes - 1)
        return Answer(logits[index, torch.arange(len(index), device=index.device)], index + 1)
