"""Inference that stops: examples that have halted leave the batch, the others go on.

After every pass the policy says who halts. Their answers are kept, their rows dropped, and columns
that were padding for everyone left are cut off. So the time of a batch follows the sum of its
passes, not the slowest example. `answer_ref` does the same one example at a time.

Shapes: B examples of the batch, R of them still running, N passes, T tokens, D width, C labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepenough.errors import UserError
from deepenough.ponder.inputs import Inputs
from deepenough.ponder.output import PonderOutput
from deepenough.ponder.policies import ExitPolicy, StepView
from deepenough.trace import DepthTrace

if TYPE_CHECKING:
    from deepenough.ponder.model import PonderClassifier


def answer(
    model: PonderClassifier, inputs: Inputs, policy: ExitPolicy, example_ids: Tensor
) -> PonderOutput:
    """Every example's answer at the pass where it halts; `inputs` as the encoder reads them."""
    check_policy(model, policy)
    num_examples, num_passes = len(inputs), model.num_passes
    stack, flops = model.stack, model.flops
    book = _Book(model, num_examples, inputs.input_ids.device)
    rows = torch.arange(num_examples, device=inputs.input_ids.device)
    memory = policy.start(example_ids, model.num_labels)
    survival = torch.zeros(num_examples, device=rows.device)
    inputs = inputs.trim()
    calls = stack.begin(**inputs.as_arguments())
    book.charge(rows, flops.begin(inputs.length))
    hidden = calls.hidden
    before = model.summary(hidden, inputs.attention_mask)
    for index in range(num_passes):
        hidden = stack.run(index, hidden, calls)
        reading = model.read(index, hidden, inputs.attention_mask, before)
        book.charge(rows, flops.layer(index, inputs.length) + model.head_flops(index))
        survival = book.note_halting(rows, index, reading.halt_logit, survival)
        if index == num_passes - 1:
            halts = torch.ones_like(rows, dtype=torch.bool)
        else:
            known = survival if model.has_halting else None
            view = StepView(torch.full_like(rows, index + 1), reading.logits, known)
            halts, memory = policy.step(view, memory)
        if not bool(halts.any()):
            before = reading.summary
            continue
        book.note_answers(rows[halts], reading.logits[halts], index + 1)
        stay = ~halts
        rows, memory, survival = rows[stay], memory[stay], survival[stay]
        if not len(rows):
            break
        inputs = inputs.select(stay).trim()
        before, hidden = reading.summary[stay], hidden[stay, : inputs.length]
        calls = stack.begin(**inputs.as_arguments())
        book.charge(rows, flops.begin(inputs.length))
    return book.close()


def answer_ref(
    model: PonderClassifier, inputs: Inputs, policy: ExitPolicy, example_ids: Tensor
) -> PonderOutput:
    """The same, one example at a time: nobody ever leaves a batch."""
    outputs = [
        answer(model, inputs.select(example_ids.new_tensor([row])), policy, example_ids[row, None])
        for row in range(len(inputs))
    ]
    joined: dict[str, Any] = {
        name: torch.cat([output[name] for output in outputs])
        for name in ("logits", "passes", "halting", "halt_probabilities")
        if outputs[0][name] is not None
    }
    traces = [output.trace for output in outputs if output.trace is not None]
    return PonderOutput(**joined, trace=DepthTrace.join(traces))


def replay(
    policy: ExitPolicy, step_logits_NBC: Tensor, halt_logits_BN: Tensor | None, example_ids: Tensor
) -> Tensor:
    """The passes `[B]` that a policy would make, from the answers of all passes.

    One run at full depth serves any number of policies: what a pass answers does not depend on who
    else is there, so this is what `answer` does, without its savings.
    """
    num_passes, num_examples, num_labels = step_logits_NBC.shape
    survival = None
    if halt_logits_BN is not None:
        survival = F.logsigmoid(-halt_logits_BN.float()).cumsum(-1)
    memory = policy.start(example_ids, num_labels)
    made = torch.full((num_examples,), num_passes, device=step_logits_NBC.device)
    running = torch.ones_like(made, dtype=torch.bool)
    for index in range(num_passes - 1):
        left = None if survival is None else survival[:, index]
        view = StepView(torch.full_like(made, index + 1), step_logits_NBC[index], left)
        halts, memory = policy.step(view, memory)
        made = torch.where(running & halts, index + 1, made)
        running &= ~halts
    return made


def choose(step_logits_NBC: Tensor, passes_B: Tensor) -> Tensor:
    """The answers `[B, C]` of the given passes."""
    return step_logits_NBC[passes_B - 1, torch.arange(len(passes_B), device=passes_B.device)]


def check_policy(model: PonderClassifier, policy: ExitPolicy) -> None:
    if policy.needs_halting and not model.has_halting:
        raise UserError(
            f"This model was made with objective {model.config.objective!r} and has no halting "
            f"probabilities for {type(policy).__name__}: use ConfidenceExit, PatienceExit or "
            "FixedExit."
        )


class _Book:
    """What is kept of examples while they run, each at its place in the batch."""

    def __init__(self, model: PonderClassifier, num_examples: int, device: torch.device) -> None:
        shape = (num_examples, model.num_passes)
        self.logits: Tensor | None = None
        self.passes = torch.zeros(num_examples, dtype=torch.long, device=device)
        self.flops = torch.zeros(num_examples, dtype=torch.float64)
        self.halting = torch.zeros(shape, device=device) if model.has_halting else None
        self.probabilities = torch.zeros(shape, device=device) if model.has_halting else None
        self.num_passes, self.num_labels = model.num_passes, model.num_labels

    def charge(self, rows: Tensor, flops: float) -> None:
        self.flops[rows.cpu()] += flops

    def note_halting(
        self, rows: Tensor, index: int, halt_logit: Tensor | None, survival: Tensor
    ) -> Tensor:
        """Keeps `lambda_n` and `p_n`; returns the logarithm of what is left after pass `n`."""
        if self.halting is None or self.probabilities is None:
            return survival
        if halt_logit is None or index == self.num_passes - 1:  # the last takes what is left
            self.probabilities[rows, index] = 1.0
            self.halting[rows, index] = survival.exp()
            return survival
        logit = halt_logit.detach().float()
        self.probabilities[rows, index] = logit.sigmoid()
        self.halting[rows, index] = (survival + F.logsigmoid(logit)).exp()
        return survival + F.logsigmoid(-logit)

    def note_answers(self, rows: Tensor, logits: Tensor, passes: int) -> None:
        self.passes[rows] = passes
        if self.logits is None:
            self.logits = logits.new_zeros(len(self.passes), self.num_labels)
        self.logits = self.logits.index_put((rows,), logits)

    def close(self) -> PonderOutput:
        ran = torch.arange(self.num_passes) < self.passes.cpu()[:, None]
        return PonderOutput(
            logits=self.logits,
            passes=self.passes,
            halting=self.halting,
            halt_probabilities=self.probabilities,
            trace=DepthTrace(self.passes.cpu(), ran, self.flops),
        )
