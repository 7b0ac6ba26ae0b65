"""Quality against passes of a pondering classifier, for every way of stopping it.

One run at full depth keeps the answers of all passes and the halting probabilities; every
threshold, confidence, patience and fixed exit is then replayed on them, because what a pass answers
does not depend on when others stop. Nothing is run twice for a sweep.

Difficulty of an example: the pass from which on the model's answer no longer changes. An example
settled at pass 1 could have stopped there; a later one is one the passes were needed for.

Shapes: B examples, N passes, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from deepenough.data.encoded_examples import EncodedExamples
from deepenough.data.length_batches import by_length
from deepenough.ponder.distribution import expected_steps, log_halting
from deepenough.ponder.inference import choose, replay
from deepenough.ponder.loss import SINGLE_LABEL, answer_loss
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.policies import (
    ConfidenceExit,
    ExitPolicy,
    FixedExit,
    PatienceExit,
    QuantileExit,
)
from deepenough.runs import Record

#: From stopping at once to never before the last pass.
THRESHOLDS: tuple[float, ...] = tuple(round(0.05 * step, 2) for step in range(1, 21))
CONFIDENCES: tuple[float, ...] = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
EVAL_BATCH = 64
NUM_SHOWN = 6
"""Examples whose halting is recorded pass by pass."""

EXIT, PASSES, EXAMPLE = "ponder_exit", "ponder_passes", "ponder_example"
"""Kinds of the records that this module makes."""


@dataclass(frozen=True)
class AllPasses:
    """What a model says of some examples after every pass."""

    step_logits: Tensor
    """[N, B, C]"""
    halt_logits: Tensor | None
    """[B, N - 1], of `lambda_n`; None of a model that has not learned to halt."""
    labels: Tensor
    """[B]"""

    @property
    def num_passes(self) -> int:
        return len(self.step_logits)

    @property
    def answers(self) -> Tensor:
        """[N, B], the likeliest label after every pass."""
        return self.step_logits.argmax(-1)


@torch.no_grad()
def all_passes(
    model: PonderClassifier, examples: EncodedExamples, accelerator: Accelerator | None = None
) -> AllPasses:
    """One run at full depth, each process its share of the batches."""
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    num_examples, num_passes = len(examples), model.num_passes
    step_logits = torch.zeros(num_passes, num_examples, model.num_labels, device=model.device)
    # Doubled precision keeps a probability near 1 apart from 1 on its way back to a logit.
    halts = torch.zeros(num_examples, num_passes, dtype=torch.float64, device=model.device)
    training = model.training
    model.eval()
    for rows in by_length(examples.lengths, EVAL_BATCH)[rank::world]:
        batch = examples.batch(rows, model.device)
        batch.pop("labels")
        output = model(**batch, all_passes=True)
        step_logits[:, rows] = output.step_logits.float()
        if output.halt_probabilities is not None:
            halts[rows] = output.halt_probabilities.double()
    model.train(training)
    if accelerator is not None and world > 1:  # rows of other processes are zero
        step_logits = accelerator.reduce(step_logits, reduction="sum")
        halts = accelerator.reduce(halts, reduction="sum")
    halt_logits = halts[:, :-1].logit(eps=1e-12).cpu() if model.has_halting else None
    return AllPasses(step_logits.cpu(), halt_logits, torch.tensor(examples.labels))


def quality(answers: AllPasses, policy: ExitPolicy) -> dict[str, float]:
    """Loss and accuracy of the answers given, mean passes, and their share of all passes."""
    passes = passes_of(answers, policy)
    logits = choose(answers.step_logits, passes)
    mean = float(passes.double().mean())
    return {
        "loss": float(answer_loss(logits, answers.labels, SINGLE_LABEL)),
        "accuracy": float((logits.argmax(-1) == answers.labels).double().mean()),
        "passes": mean,
        "share": mean / answers.num_passes,
    }


def passes_of(answers: AllPasses, policy: ExitPolicy) -> Tensor:
    """At which pass each example stops, `[B]`."""
    numbers = torch.arange(len(answers.labels))
    return replay(policy, answers.step_logits, answers.halt_logits, numbers)


def settled_at(answers: AllPasses) -> Tensor:
    """The pass from which on the answer no longer changes, `[B]`, counted from 1."""
    differs = answers.answers != answers.answers[-1]
    position = torch.arange(1, answers.num_passes + 1)[:, None]
    return (differs * position).amax(0) + 1


# -- sweeps -----------------------------------------------------------------------------------


def sweep(answers: AllPasses, thresholds: Sequence[float] = THRESHOLDS) -> list[dict[str, Any]]:
    """Every threshold (where the model halts), confidence, patience and fixed exit, with its
    quality."""
    policies: list[tuple[str, float, ExitPolicy]] = []
    if answers.halt_logits is not None:
        policies += [("quantile", value, QuantileExit(value)) for value in thresholds]
    if answers.step_logits.shape[-1] > 1:
        policies += [("confidence", value, ConfidenceExit(value)) for value in CONFIDENCES]
    for passes in range(1, answers.num_passes):
        policies.append(("patience", passes, PatienceExit(passes)))
    for passes in range(1, answers.num_passes + 1):
        policies.append(("fixed", passes, FixedExit(passes)))
    return [
        {"policy": name, "setting": setting} | quality(answers, policy)
        for name, setting, policy in policies
    ]


def passes_by(groups: Tensor, num_groups: int, passes: Tensor, num_passes: int) -> list[list[int]]:
    """How many examples of each group (from 0) made 1, 2, ... passes: `[groups][N]`."""
    cells = groups * num_passes + passes - 1
    counts = cells.bincount(minlength=num_groups * num_passes)
    table: list[list[int]] = counts.view(num_groups, num_passes).tolist()
    return table


# -- records ----------------------------------------------------------------------------------


def records(
    answers: AllPasses,
    policy: ExitPolicy,
    labels: Sequence[str],
    texts: Sequence[str],
    *,
    step: int,
    about: dict[str, Any],
    thresholds: Sequence[float] = THRESHOLDS,
) -> list[Record]:
    """Everything the pictures need; `about` says in each what was measured: model, split."""
    about = about | {"num_passes": answers.num_passes}
    found = [Record(step, EXIT, about | point) for point in sweep(answers, thresholds)]
    passes = passes_of(answers, policy)
    tables = {
        "label": (list(labels), answers.labels),
        "difficulty": (
            [str(number) for number in range(1, answers.num_passes + 1)],
            settled_at(answers) - 1,
        ),
    }
    for by, (names, groups) in tables.items():
        counts = passes_by(groups, len(names), passes, answers.num_passes)
        found.append(Record(step, PASSES, about | {"by": by, "groups": names, "counts": counts}))
    if answers.halt_logits is not None:
        log_p = log_halting(answers.halt_logits, answers.num_passes)
        for row in spread(expected_steps(log_p), NUM_SHOWN):
            values = _example(answers, row, labels, texts[row])
            halting = {"halting": _rounded(log_p[row].exp()), "passes": int(passes[row])}
            found.append(Record(step, EXAMPLE, about | values | halting))
    return found


def spread(values: Tensor, num: int) -> list[int]:
    """Rows from the lowest value to the highest, evenly by rank."""
    order = values.argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(num, len(order))).round().long()
    rows: list[int] = order[places].tolist()
    return rows


def _example(answers: AllPasses, row: int, labels: Sequence[str], text: str) -> dict[str, Any]:
    """What would be answered of one example after every pass."""
    probabilities = answers.step_logits[:, row].softmax(-1)
    return {
        "text": text,
        "label": labels[int(answers.labels[row])],
        "answers": [labels[int(number)] for number in probabilities.argmax(-1)],
        "confidence": _rounded(probabilities.amax(-1)),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
