"""Inference that stops: examples that have halted leave the batch, the others go on.

`run_batch`: after every pass the policy says who halts. Their answers are kept, their rows dropped,
and columns that were padding for everyone left are cut off. So the time of a batch follows the sum
of its passes, not the slowest example.

`predict`: from texts to labels, batch after batch of similar length. Filling the rows of halted
examples with the next texts at once was measured too, and gained nothing on a CPU.

Shapes: B examples of the batch, R of them still running, N passes, T tokens, D width, C labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical
from transformers.utils.generic import ModelOutput

from deepenough.data.batches import by_length
from deepenough.data.classification import EncodedExamples, Example
from deepenough.data.config import REGRESSION, SINGLE_LABEL
from deepenough.data.tokenizer import check_text
from deepenough.errors import UserError
from deepenough.ponder.halting import HaltingPolicy, StepView, confidence, decide, log_survival
from deepenough.trace import DepthTrace

if TYPE_CHECKING:
    from deepenough.ponder.modeling import PonderClassifier

Text = str | tuple[str, str]
"""A text, or a text and its pair."""

BATCHES_AHEAD = 8
"""Batches whose texts are read and sorted by length together: enough to save padding, few enough to
stream."""

SOURCE_KEYS = ("halt_probabilities", "model_halt_dist", "target_halt_dist")
"""What PonderALBERT's source returns besides `logits` and `passes`, computed when asked for."""

NO_LIMIT = 1 << 30
"""Tokens of a text where neither model nor caller sets a limit."""


Inputs = dict[str, Tensor]
"""Token ids `[R, T]` with mask and types where they are given, by the names that encoders use."""


def trim(inputs: Inputs) -> Inputs:
    """Return a batch without the columns at the end that are padding in every row."""
    if "attention_mask" not in inputs:
        return inputs
    used = inputs["attention_mask"].bool().any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return {name: tensor[:, :length] for name, tensor in inputs.items()}


@dataclass
class PonderOutput(ModelOutput):
    """What a pondering classifier returns."""

    loss: Tensor | None = None
    """Of all passes where all were made; else of the answers given."""
    logits: Tensor | None = None
    """`[B, C]`: each row is the answer of the pass at which that example halted."""
    passes: Tensor | None = None
    """`[B]`: at which pass each example halted, counted from 1."""
    halting: Tensor | None = None
    """`[B, N]`: the distribution `p_n`; 0 after the pass at which an example really stopped."""
    halt_logits: Tensor | None = None
    """`[B, N - 1]`: the logits of `lambda_n`, where all passes were made."""
    step_logits: Tensor | None = None
    """`[N, B, C]`: the answers of every pass, where all were made."""
    terms: dict[str, Tensor] | None = None
    """The terms of the loss: `task` and `kl`, before its weight."""
    trace: DepthTrace | None = None
    """In evaluation: passes, which of them ran, and their cost."""
    prior: Tensor | None = None
    """`[B, N]`: the geometric prior of the halting distribution."""

    def __getitem__(self, key: Any) -> Any:
        """Return a value by name or place, also by the names of PonderALBERT's source."""
        return getattr(self, key) if key in SOURCE_KEYS else super().__getitem__(key)

    @property
    def halt_probabilities(self) -> Tensor | None:
        """`[B, N]`: `lambda_n`, 1 at the last pass; 0 after the pass where an example stopped."""
        if self.halt_logits is not None:
            return F.pad(self.halt_logits.sigmoid(), (0, 1), value=1.0)
        if self.halting is None:
            return None
        reached = 1 - F.pad(self.halting.cumsum(-1)[:, :-1], (1, 0))
        return (self.halting / reached.clamp_min(1e-38)).clamp_max(1.0)

    @property
    def model_halt_dist(self) -> Categorical | None:
        """The distribution over passes; of examples that stopped, given that they halt by then."""
        return None if self.halting is None else Categorical(self.halting, validate_args=False)

    @property
    def target_halt_dist(self) -> Categorical | None:
        """The geometric prior over the same passes."""
        return None if self.prior is None else Categorical(self.prior, validate_args=False)


# -- one batch -------------------------------------------------------------------------------------


def run_batch(
    model: PonderClassifier, inputs: Inputs, policy: HaltingPolicy, example_ids: Tensor
) -> PonderOutput:
    """Return every example's answer at the pass where it halts.

    `inputs` are those of `PonderClassifier.prepare`; `example_ids` number the examples for draws
    with a seed.
    """
    num_passes, stack = model.num_passes, model.stack
    rows = torch.arange(len(example_ids), device=example_ids.device)
    memory = policy.start(example_ids)
    passes = torch.zeros_like(rows)
    flops = torch.zeros(len(rows), dtype=torch.float64)
    halting = survival = None
    if model.has_halting:
        halting = torch.zeros(len(rows), num_passes, device=rows.device)
        survival = torch.zeros(len(rows), device=rows.device)
    answers: list[tuple[Tensor, Tensor]] = []
    inputs = trim(inputs)
    calls = stack.begin(**inputs)
    hidden, mask = calls[0].hidden, inputs.get("attention_mask")
    spent: float = model.begin_flops(hidden.shape[1])  # by each example that is still running
    before = model.pool(hidden, mask)
    for index in range(num_passes):
        hidden = stack.run(index, hidden, calls)
        logits, halt_logit, before = model.read(index, hidden, mask, before)
        spent += model.pass_flops(index, *hidden.shape[:2])
        if halting is not None and survival is not None:
            if halt_logit is None:  # the last pass takes what is left
                halting[rows, index] = survival.exp()
            else:
                halt = halt_logit.detach().float()
                halting[rows, index] = (survival + F.logsigmoid(halt)).exp()
                survival = survival + F.logsigmoid(-halt)
        if index == num_passes - 1:
            halts = torch.ones_like(rows, dtype=torch.bool)
        else:
            halts, memory = policy.step(
                StepView(index + 1, logits, survival, model.problem), memory
            )
        if not halts.any():
            continue
        answers.append((rows[halts], logits[halts]))
        passes[rows[halts]] = index + 1
        flops[rows[halts].cpu()] = spent
        stay = ~halts
        rows, memory = rows[stay], memory[stay]
        if not len(rows):
            break
        survival = None if survival is None else survival[stay]
        inputs = trim({name: tensor[stay] for name, tensor in inputs.items()})
        length, mask = inputs["input_ids"].shape[1], inputs.get("attention_mask")
        before, hidden = before[stay], hidden[stay, :length]
        calls = stack.begin(**inputs)
        spent += model.begin_flops(length)
    order = torch.cat([halted for halted, _ in answers]).argsort()
    ran = torch.arange(num_passes) < passes.cpu()[:, None]
    return PonderOutput(
        logits=torch.cat([logits for _, logits in answers])[order],
        passes=passes,
        halting=halting,
        trace=DepthTrace(passes.cpu(), ran, flops),
    )


def replay(
    policy: HaltingPolicy,
    step_logits_NBC: Tensor,
    halt_logits_BN: Tensor | None,
    example_ids: Tensor | None = None,
    problem: str = SINGLE_LABEL,
) -> Tensor:
    """Return the passes `[B]` that a policy would make, from the answers of all passes.

    One run at full depth serves any number of policies: what a pass answers does not depend on who
    else is there, so this is what `run_batch` does, without its savings.
    """
    num_passes, num_examples, _ = step_logits_NBC.shape
    survival = None if halt_logits_BN is None else log_survival(halt_logits_BN.float())
    made = torch.full((num_examples,), num_passes, device=step_logits_NBC.device)
    if example_ids is None:
        example_ids = torch.arange(num_examples, device=made.device)
    memory = policy.start(example_ids)
    running = torch.ones_like(made, dtype=torch.bool)
    for index in range(num_passes - 1):
        left = None if survival is None else survival[:, index]
        view = StepView(index + 1, step_logits_NBC[index], left, problem)
        halts, memory = policy.step(view, memory)
        made = torch.where(running & halts, index + 1, made)
        running &= ~halts
    return made


def select_pass(step_logits_NBC: Tensor, passes_B: Tensor) -> Tensor:
    """Return the answers `[B, C]` of the given passes, counted from 1."""
    return step_logits_NBC[passes_B - 1, torch.arange(len(passes_B), device=passes_B.device)]


# -- texts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The answer to one text; an empty text has no label and takes no pass."""

    label: str | list[str] | float | None = None
    """The label, all that hold where there may be several, or the value of a regression."""
    probability: float | None = None
    """That of the label; of several labels, that of the least sure decision."""
    passes: int = 0
    """After how many passes the text was decided."""


@torch.no_grad()
def predict(
    model: PonderClassifier,
    texts: Iterable[Text],
    tokenizer: Any,
    policy: HaltingPolicy | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
) -> Iterator[Prediction]:
    """Yield answers in the order of the texts, which may be endless; some batches are read ahead.

    `policy` replaces the exit of the model's config. Texts are cut at `max_length` tokens; by
    default a text that is longer than the model takes is refused.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1: got {batch_size}.")
    if model.training:
        raise UserError("Predictions need a model in evaluation mode: call model.eval() first.")
    taken = model.max_length or NO_LIMIT
    limit = min(max_length, taken) if max_length else taken + 1  # one more shows what is too long
    names: Any = model.config.id2label
    source, num_read, num_asked = iter(texts), 0, 0
    while chunk := list(islice(source, BATCHES_AHEAD * batch_size)):
        examples = [as_example(text, num_read + place) for place, text in enumerate(chunk)]
        if len({example.pair is None for example in examples}) > 1:
            raise UserError("Some texts have a pair and some have none: give all of them one kind.")
        asked = [place for place, example in enumerate(examples) if _says_something(example)]
        found = [Prediction()] * len(chunk)
        if asked:
            encoded = EncodedExamples([examples[place] for place in asked], tokenizer, limit)
            if max_length is None and (longest := max(encoded.lengths)) == limit:
                number = num_read + asked[list(encoded.lengths).index(longest)]
                raise UserError(
                    f"Text {number} has more than the {limit - 1} tokens that the model takes: "
                    "shorten it, or let texts be cut with max_length."
                )
            for rows in by_length(encoded.lengths, batch_size):
                batch = encoded.batch(rows, model.device)
                batch.pop("labels")
                numbers = num_asked + torch.tensor(rows, device=model.device)
                output = model(**batch, policy=policy, example_ids=numbers)
                answers = [_name(answer, names) for answer in decide(output.logits, model.problem)]
                sure: list[float | None] = [None] * len(rows)
                if model.problem != REGRESSION:
                    sure = confidence(output.logits.float(), model.problem).tolist()
                for row, *values in zip(rows, answers, sure, output.passes.tolist(), strict=True):
                    found[asked[row]] = Prediction(*values)
        yield from found
        num_read, num_asked = num_read + len(chunk), num_asked + len(asked)


def as_example(text: Any, number: int) -> Example:
    """Return a text, or a text and its pair, as an example whose label nobody reads."""
    parts = [text] if isinstance(text, str) else text
    right = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    if not right or (not isinstance(text, str) and len(parts) != 2):
        raise UserError(f"Text {number} is neither a string nor a pair of strings: {text!r:.80}.")
    for part in parts:
        check_text(part, f"Text {number}")
    return Example(parts[0], parts[1] if len(parts) == 2 else None, label=0)


def _name(answer: Tensor, names: Any) -> str | list[str] | float:
    """Return what people read of an answer: a label's name, a list of them, or a value."""
    if answer.ndim:
        return [names[number] for number in answer.nonzero()[:, 0].tolist()]
    value = answer.item()
    return value if answer.is_floating_point() else str(names[value])


def _says_something(example: Example) -> bool:
    return all(part is None or part.strip() for part in (example.text, example.pair))
