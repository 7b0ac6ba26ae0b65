"""Inference that stops: examples that have halted leave the batch, the others go on.

`run_batch`: after every pass the policy says who halts. Their answers are kept, their rows dropped,
and columns that were padding for everyone left are cut off. So the time of a batch follows the sum
of its passes, not the slowest example. `run_batch_ref` does the same one example at a time.

`ContinuousBatcher`: a stream of inputs through a batch that stays full, because rows freed by
halted examples are refilled. Examples wait in groups, one for each layer, and a group is run when
it has enough of them for a full batch: the deepest first, so that examples leave before others come
in. A layer that is shared by all passes makes a single group, in which examples at different passes
share one batch. Answers come in the order of the inputs, each equal to that of the input run alone.
An example that keeps many finished ones waiting is run in a batch that is not full.

Shapes: B examples of the batch, R of them still running, N passes, T tokens, D width, C labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils.generic import ModelOutput

from deepenough.errors import UserError
from deepenough.ponder.halting import HaltingPolicy, StepView, log_survival
from deepenough.trace import DepthTrace

if TYPE_CHECKING:
    from deepenough.ponder.modeling import PonderClassifier


@dataclass(frozen=True)
class EncoderInputs:
    """Token ids `[R, T]` with what belongs to them; rows can leave, padding can be cut off."""

    input_ids: Tensor
    attention_mask: Tensor | None = None
    token_type_ids: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens T, padding included."""
        return self.input_ids.shape[1]

    def __len__(self) -> int:
        return len(self.input_ids)

    def as_arguments(self) -> dict[str, Any]:
        """Return the tensors that are given, by the names that encoders use."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def select(self, rows: Tensor) -> EncoderInputs:
        """Return some of the rows, by index or mask."""
        return self._map(lambda tensor: tensor[rows])

    def trim(self) -> EncoderInputs:
        """Return the batch without the columns at the end that are padding in every row."""
        if self.attention_mask is None:
            return self
        used = self.attention_mask.bool().any(0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return self if length == self.length else self._map(lambda tensor: tensor[:, :length])

    def with_second_cls(self) -> EncoderInputs:
        """Return the batch with the first token twice, the second one for the halting head."""
        return self._map(lambda tensor: torch.cat([tensor[:, :1], tensor], 1))

    def check(self, max_length: int | None) -> None:
        """Refuse an empty batch, and texts longer than `max_length` tokens."""
        if self.input_ids.ndim != 2 or not self.input_ids.numel():
            raise UserError(
                "A pondering model needs token ids of shape [examples, tokens], neither of them "
                f"0: got {tuple(self.input_ids.shape)}."
            )
        if max_length is not None and self.length > max_length:
            raise UserError(
                f"The texts are {self.length} tokens long, and the model takes at most "
                f"{max_length}: truncate them (truncation=True, max_length={max_length})."
            )

    def _map(self, change: Any) -> EncoderInputs:
        return EncoderInputs(**{name: change(value) for name, value in self.as_arguments().items()})


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
    halt_probabilities: Tensor | None = None
    """`[B, N]`: `lambda_n`, 1 at the last pass; 0 after an example stopped."""
    step_logits: Tensor | None = None
    """`[N, B, C]`: the answers of every pass, where all were made."""
    terms: dict[str, Tensor] | None = None
    """The terms of the loss: `task` and `kl`, before its weight."""
    trace: DepthTrace | None = None
    """In evaluation: passes, which of them ran, and their cost."""


# -- one batch -------------------------------------------------------------------------------------


def run_batch(
    model: PonderClassifier, inputs: EncoderInputs, policy: HaltingPolicy, example_ids: Tensor
) -> PonderOutput:
    """Return every example's answer at the pass where it halts.

    `inputs` are those of `PonderClassifier.prepare`; `example_ids` number the examples for draws
    with a seed.
    """
    check_policy(model, policy)
    num_examples, num_passes = len(inputs), model.num_passes
    stack, flops = model.stack, model.flops
    results = _BatchResults(model, num_examples, inputs.input_ids.device)
    rows = torch.arange(num_examples, device=inputs.input_ids.device)
    memory = policy.start(example_ids, model.num_labels)
    survival = torch.zeros(num_examples, device=rows.device)
    inputs = inputs.trim()
    calls = stack.begin(**inputs.as_arguments())
    results.charge(rows, flops.begin(inputs.length))
    hidden = calls[0].hidden
    before = model.pool(hidden, inputs.attention_mask)
    for index in range(num_passes):
        hidden = stack.run(index, hidden, calls)
        reading = model.read(index, hidden, inputs.attention_mask, before)
        results.charge(rows, flops.layer(index, inputs.length) + model.head_flops(index))
        survival = results.note_halting(rows, index, reading.halt_logit, survival)
        if index == num_passes - 1:
            halts = torch.ones_like(rows, dtype=torch.bool)
        else:
            known = survival if model.has_halting else None
            view = StepView(torch.full_like(rows, index + 1), reading.logits, known)
            halts, memory = policy.step(view, memory)
        if not bool(halts.any()):
            before = reading.pooled
            continue
        results.note_answers(rows[halts], reading.logits[halts], index + 1)
        stay = ~halts
        rows, memory, survival = rows[stay], memory[stay], survival[stay]
        if not len(rows):
            break
        inputs = inputs.select(stay).trim()
        before, hidden = reading.pooled[stay], hidden[stay, : inputs.length]
        calls = stack.begin(**inputs.as_arguments())
        results.charge(rows, flops.begin(inputs.length))
    return results.output()


def run_batch_ref(
    model: PonderClassifier, inputs: EncoderInputs, policy: HaltingPolicy, example_ids: Tensor
) -> PonderOutput:
    """Run the same one example at a time: nobody ever leaves a batch."""
    outputs = [
        run_batch(
            model, inputs.select(example_ids.new_tensor([row])), policy, example_ids[row, None]
        )
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
    policy: HaltingPolicy,
    step_logits_NBC: Tensor,
    halt_logits_BN: Tensor | None,
    example_ids: Tensor,
) -> Tensor:
    """Return the passes `[B]` that a policy would make, from the answers of all passes.

    One run at full depth serves any number of policies: what a pass answers does not depend on who
    else is there, so this is what `run_batch` does, without its savings.
    """
    num_passes, num_examples, num_labels = step_logits_NBC.shape
    survival = None if halt_logits_BN is None else log_survival(halt_logits_BN.float())
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


def select_pass(step_logits_NBC: Tensor, passes_B: Tensor) -> Tensor:
    """Return the answers `[B, C]` of the given passes, counted from 1."""
    return step_logits_NBC[passes_B - 1, torch.arange(len(passes_B), device=passes_B.device)]


def check_policy(model: PonderClassifier, policy: HaltingPolicy) -> None:
    """Refuse a policy that reads halting probabilities of a model that has none."""
    if policy.needs_halting and not model.has_halting:
        raise UserError(
            f"This model was made with objective {model.config.objective!r} and has no halting "
            f"probabilities for {type(policy).__name__}: use ConfidenceExit, PatienceExit or "
            "FixedExit."
        )


class _BatchResults:
    """Results of examples while they run, each at its place in the batch."""

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
        """Keep `lambda_n` and `p_n`; return the logarithm of what is left after pass `n`."""
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

    def output(self) -> PonderOutput:
        ran = torch.arange(self.num_passes) < self.passes.cpu()[:, None]
        return PonderOutput(
            logits=self.logits,
            passes=self.passes,
            halting=self.halting,
            halt_probabilities=self.probabilities,
            trace=DepthTrace(self.passes.cpu(), ran, self.flops),
        )


# -- a stream of inputs --------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedAnswer:
    """The answer to one input of a stream."""

    index: int
    """The number of the input, counted from 0."""
    logits: Tensor
    """`[C]`, of the pass at which it halted."""
    passes: int
    halting: list[float]
    """`p_1, p_2, ...` up to that pass; empty for models without halting probabilities."""
    flops: float
    """What it cost, padding included."""


@dataclass
class _Running:
    """An example between two passes."""

    index: int
    inputs: EncoderInputs
    """A batch of one, without padding."""
    memory: Tensor
    survival: float = 0.0
    passes: int = 0
    flops: float = 0.0
    hidden: Tensor | None = None
    """`[T, D]`; None before the first pass."""
    before: Tensor | None = None
    halting: tuple[float, ...] = ()


class ContinuousBatcher:
    """Runs a stream of inputs; holds the examples of it that are on their way."""

    def __init__(self, model: PonderClassifier, batch_size: int, policy: HaltingPolicy) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1: got {batch_size}.")
        if model.training:
            raise UserError("Predictions need a model in evaluation mode: call model.eval() first.")
        check_policy(model, policy)
        self._model = model
        self._batch_size = batch_size
        self._policy = policy
        num_groups = 1 if model.stack.shared else model.num_passes
        self._groups: list[list[_Running]] = [[] for _ in range(num_groups)]
        self._finished: dict[int, StreamedAnswer] = {}
        # Room for every group to fill up before anybody is hurried.
        self._most_waiting = 2 * batch_size * num_groups

    def run(self, encodings: Iterable[Mapping[str, Any]]) -> Iterator[StreamedAnswer]:
        """Yield answers in the order of the inputs, which are read as room comes free."""
        source = enumerate(encodings)
        num_given = 0
        exhausted = False
        while True:
            group = self._next_group(exhausted, num_given)
            if group is not None:
                self._advance(group)
            elif exhausted:
                return
            else:
                wanted = self._batch_size - len(self._groups[0])
                new = [self._enter(index, encoding) for index, encoding in islice(source, wanted)]
                self._groups[0].extend(new)
                exhausted = len(new) < wanted
            while num_given in self._finished:
                yield self._finished.pop(num_given)
                num_given += 1

    def _next_group(self, exhausted: bool, num_given: int) -> int | None:
        """Return the group to run now; None if more inputs should come in first."""
        filled = [group for group, waiting in enumerate(self._groups) if waiting]
        if len(self._finished) > self._most_waiting:
            oldest = [g for g in filled if any(row.index == num_given for row in self._groups[g])]
            return oldest[0]
        full = [group for group in filled if len(self._groups[group]) >= self._batch_size]
        if full:
            return full[-1]
        # At the end the shallowest goes first and takes its examples to the others.
        return filled[0] if exhausted and filled else None

    def _enter(self, index: int, encoding: Mapping[str, Any]) -> _Running:
        device = self._model.device
        given = {
            name: torch.as_tensor(encoding[name], device=device).view(1, -1)
            for name in ("input_ids", "attention_mask", "token_type_ids")
            if encoding.get(name) is not None
        }
        mask = given.pop("attention_mask", None)
        if mask is not None:
            given = {name: value[:, mask[0].bool()] for name, value in given.items()}
        inputs = self._model.prepare(**given)
        number = torch.tensor([index], device=device)
        return _Running(index, inputs, self._policy.start(number, self._model.num_labels)[0])

    @torch.no_grad()
    def _advance(self, group: int) -> None:
        """Make one pass of those examples of a group that have waited longest."""
        model, waiting = self._model, self._groups[group]
        waiting.sort(key=lambda row: row.index)
        batch, self._groups[group] = waiting[: self._batch_size], waiting[self._batch_size :]
        inputs = _pad([row.inputs for row in batch], model.pad_token_id)
        calls = model.stack.begin(**inputs.as_arguments())
        hidden = _insert(calls[0].hidden, [row.hidden for row in batch])
        first = model.pool(calls[0].hidden, inputs.attention_mask)
        pairs = zip(batch, first, strict=True)
        before = torch.stack([new if row.before is None else row.before for row, new in pairs])
        hidden = model.stack.run(group, hidden, calls)
        logits, halt_logit, pooled = model.read(group, hidden, inputs.attention_mask, before)
        self._count(batch, group, inputs.length, halt_logit)
        halts, memory = self._decide(batch, logits)
        following = 0 if len(self._groups) == 1 else group + 1
        for number, row in enumerate(batch):
            if halts[number]:
                self._finish(row, logits[number])
                continue
            row.memory, row.before = memory[number], pooled[number]
            row.hidden = hidden[number, : row.inputs.length]
            self._groups[following].append(row)

    def _count(
        self, batch: list[_Running], group: int, length: int, halt_logit: Tensor | None
    ) -> None:
        """Update passes, costs and halting probabilities after a pass."""
        model = self._model
        cost = model.flops.begin(length) + model.flops.layer(group, length)
        lambdas = survivals = None
        if halt_logit is not None:
            lambdas = F.logsigmoid(halt_logit.float()).tolist()
            survivals = F.logsigmoid(-halt_logit.float()).tolist()
        for number, row in enumerate(batch):
            row.passes += 1
            row.flops += cost + model.head_flops(group)
            if not model.has_halting:
                continue
            survival = torch.tensor(row.survival)
            if row.passes == model.num_passes or lambdas is None or survivals is None:
                row.halting += (float(survival.exp()),)
            else:
                row.halting += (float((survival + lambdas[number]).exp()),)
                row.survival += survivals[number]

    def _decide(self, batch: list[_Running], logits: Tensor) -> tuple[list[bool], Tensor]:
        """Return who halts, and what the policy remembers of all."""
        model, device = self._model, logits.device
        memory = torch.stack([row.memory for row in batch])
        passes = torch.tensor([row.passes for row in batch], device=device)
        survival = None
        if model.has_halting:
            survival = torch.tensor([row.survival for row in batch], device=device)
        halts, memory = self._policy.step(StepView(passes, logits, survival), memory)
        return (halts | (passes == model.num_passes)).tolist(), memory

    def _finish(self, row: _Running, logits: Tensor) -> None:
        self._finished[row.index] = StreamedAnswer(
            row.index, logits, row.passes, list(row.halting), row.flops
        )


def _pad(inputs: list[EncoderInputs], pad_token_id: int) -> EncoderInputs:
    """Join batches of one into one batch."""
    fills = {"input_ids": pad_token_id, "token_type_ids": 0}
    given = [(row.as_arguments(), torch.zeros_like(row.input_ids)) for row in inputs]
    padded = {
        name: pad_sequence([row.get(name, zeros)[0] for row, zeros in given], True, fill)
        for name, fill in fills.items()
        if any(name in row for row, _ in given)
    }
    masks = [torch.ones_like(row.input_ids[0]) for row in inputs]
    return EncoderInputs(**padded, attention_mask=pad_sequence(masks, True, 0))


def _insert(hidden_RTD: Tensor, states: list[Tensor | None]) -> Tensor:
    """Return embeddings of examples that begin, and the states of the others in their place."""
    if all(state is None for state in states):
        return hidden_RTD
    result = hidden_RTD.clone()
    for row, state in enumerate(states):
        if state is not None:
            result[row, : len(state)] = state
    return result
