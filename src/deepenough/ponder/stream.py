"""A stream of inputs through a batch that stays full: rows freed by halted examples are refilled.

Examples wait in groups, one for each layer, and a group is run when it has enough of them for a
full batch: the deepest first, so that examples leave before others come in. A layer that is shared
by all passes makes a single group, in which examples at different passes share one batch. Thus
layers nearly always compute full batches, whenever examples halt.

Answers come in the order of the inputs, each equal to that of the input run alone. An example that
keeps many finished ones waiting is run in a batch that is not full.

Shapes: R examples of a batch, T tokens, D width, C labels.
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

from deepenough.errors import UserError
from deepenough.ponder.inference import check_policy
from deepenough.ponder.inputs import Inputs
from deepenough.ponder.policies import ExitPolicy, StepView

if TYPE_CHECKING:
    from deepenough.ponder.model import PonderClassifier


@dataclass(frozen=True)
class StreamAnswer:
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
    inputs: Inputs
    """A batch of one, without padding."""
    memory: Tensor
    survival: float = 0.0
    passes: int = 0
    flops: float = 0.0
    hidden: Tensor | None = None
    """`[T, D]`; None before the first pass."""
    before: Tensor | None = None
    halting: tuple[float, ...] = ()


class Stream:
    """One stream of inputs and the examples of it that are on their way."""

    def __init__(self, model: PonderClassifier, rows: int, policy: ExitPolicy) -> None:
        if rows < 1:
            raise UserError(f"A stream needs at least 1 row: got {rows}.")
        if model.training:
            raise UserError("A stream is for evaluation: call model.eval() first.")
        check_policy(model, policy)
        self._model = model
        self._rows = rows
        self._policy = policy
        num_groups = 1 if model.stack.shared else model.num_passes
        self._groups: list[list[_Running]] = [[] for _ in range(num_groups)]
        self._finished: dict[int, StreamAnswer] = {}
        # Room for every group to fill up before anybody is hurried.
        self._most_waiting = 2 * rows * num_groups

    def run(self, encodings: Iterable[Mapping[str, Any]]) -> Iterator[StreamAnswer]:
        """Answers in the order of the inputs, which are read as room comes free."""
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
                wanted = self._rows - len(self._groups[0])
                new = [self._enter(index, encoding) for index, encoding in islice(source, wanted)]
                self._groups[0].extend(new)
                exhausted = len(new) < wanted
            while num_given in self._finished:
                yield self._finished.pop(num_given)
                num_given += 1

    def _next_group(self, exhausted: bool, num_given: int) -> int | None:
        """The group to run now; None if more inputs should come in first."""
        filled = [group for group, waiting in enumerate(self._groups) if waiting]
        if len(self._finished) > self._most_waiting:
            oldest = [g for g in filled if any(row.index == num_given for row in self._groups[g])]
            return oldest[0]
        full = [group for group in filled if len(self._groups[group]) >= self._rows]
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
        """One pass of up to `rows` examples of a group, those who have waited longest."""
        model, waiting = self._model, self._groups[group]
        waiting.sort(key=lambda row: row.index)
        batch, self._groups[group] = waiting[: self._rows], waiting[self._rows :]
        inputs = _pad([row.inputs for row in batch], model.pad_token_id)
        calls = model.stack.begin(**inputs.as_arguments())
        hidden = _insert(calls.hidden, [row.hidden for row in batch])
        first = model.summary(calls.hidden, inputs.attention_mask)
        pairs = zip(batch, first, strict=True)
        before = torch.stack([new if row.before is None else row.before for row, new in pairs])
        hidden = model.stack.run(group, hidden, calls)
        logits, halt_logit, summary = model.read(group, hidden, inputs.attention_mask, before)
        self._count(batch, group, inputs.length, halt_logit)
        halts, memory = self._decide(batch, logits)
        following = 0 if len(self._groups) == 1 else group + 1
        for number, row in enumerate(batch):
            if halts[number]:
                self._finish(row, logits[number])
                continue
            row.memory, row.before = memory[number], summary[number]
            row.hidden = hidden[number, : row.inputs.length]
            self._groups[following].append(row)

    def _count(
        self, batch: list[_Running], group: int, length: int, halt_logit: Tensor | None
    ) -> None:
        """Passes, costs and halting probabilities after a pass."""
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
        """Who halts, and what the policy remembers of all."""
        model, device = self._model, logits.device
        memory = torch.stack([row.memory for row in batch])
        passes = torch.tensor([row.passes for row in batch], device=device)
        survival = None
        if model.has_halting:
            survival = torch.tensor([row.survival for row in batch], device=device)
        halts, memory = self._policy.step(StepView(passes, logits, survival), memory)
        return (halts | (passes == model.num_passes)).tolist(), memory

    def _finish(self, row: _Running, logits: Tensor) -> None:
        self._finished[row.index] = StreamAnswer(
            row.index, logits, row.passes, list(row.halting), row.flops
        )


def _pad(inputs: list[Inputs], pad_token_id: int) -> Inputs:
    """Several batches of one as one batch."""
    fills = {"input_ids": pad_token_id, "token_type_ids": 0}
    given = [(row.as_arguments(), torch.zeros_like(row.input_ids)) for row in inputs]
    padded = {
        name: pad_sequence([row.get(name, zeros)[0] for row, zeros in given], True, fill)
        for name, fill in fills.items()
        if any(name in row for row, _ in given)
    }
    masks = [torch.ones_like(row.input_ids[0]) for row in inputs]
    return Inputs(**padded, attention_mask=pad_sequence(masks, True, 0))


def _insert(hidden_RTD: Tensor, states: list[Tensor | None]) -> Tensor:
    """Embeddings of examples that begin, and the states of the others in their place."""
    if all(state is None for state in states):
        return hidden_RTD
    result = hidden_RTD.clone()
    for row, state in enumerate(states):
        if state is not None:
            result[row, : len(state)] = state
    return result
