"""Classifiers that ponder as candidates of a comparison: accuracy, over ways of stopping."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepenough.config import resolve
from deepenough.data.classification import (
    ClassificationData,
    LabelledTexts,
    open_classification,
    with_dataset,
)
from deepenough.data.encoded_examples import EncodedExamples
from deepenough.data.length_batches import by_length
from deepenough.errors import UserError
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Entry,
    OperatingPoint,
    Scores,
    content_of,
    share_interval,
)
from deepenough.ponder.evaluation import load_classifier
from deepenough.ponder.output import PonderOutput
from deepenough.ponder.policies import ConfidenceExit, ExitPolicy, FixedExit, QuantileExit
from deepenough.ponder.training import token_limit
from deepenough.runs import read_section
from deepenough.trace import DepthTrace

EXAMPLES, BATCH = 512, 32
POLICIES: dict[str, Callable[[Any], ExitPolicy]] = {
    "threshold": QuantileExit,
    "confidence": ConfidenceExit,
    "passes": FixedExit,
}
#: The same, as `ponder eval` is told.
FLAGS = {
    "threshold": "--exit.exit quantile --exit.threshold {value:g}",
    "confidence": "--exit.exit confidence --exit.threshold {value:g}",
    "passes": "--exit.exit fixed --exit.passes {value}",
}


class LabelCandidate:
    mechanism = "ponder"

    def __init__(self, entry: Entry, name: str, data: ComparedData) -> None:
        self.name, self.entry = name, entry
        self.model, tokenizer = load_classifier(entry.run)
        trained = resolve(ClassificationData, overrides=read_section(entry.run, "data"))
        same = data.data in (None, trained.dataset)
        asked = trained if same else with_dataset(trained, str(data.data))
        names: Any = self.model.config.id2label
        labels = [names[number] for number in range(self.model.num_labels)]
        texts = open_classification(asked, labels)
        split = _split(texts, data.split)
        rows = texts.split(split)[: data.limit or EXAMPLES]
        examples = EncodedExamples(rows, tokenizer, token_limit(self.model, trained), split)
        size = data.batch_size or BATCH
        self.batches = [
            examples.batch(part, self.model.device) for part in by_length(examples.lengths, size)
        ]
        self.labels: Tensor = torch.cat([batch.pop("labels") for batch in self.batches])
        detail = {"examples": len(rows), "batch_size": size, "labels": labels}
        detail["content"] = content_of((row.text, row.pair, row.label) for row in rows)
        self.where = f" --split {split}"
        if asked is not trained:
            self.where = f" --dataset {shlex.quote(asked.dataset)}{self.where}"
        self.task = ComparedTask(
            "classification", texts.name, split, "example", "accuracy", True, detail
        )

    def points(self) -> Sequence[OperatingPoint]:
        last, grid = self.model.num_passes, self.entry.grid
        usual = sorted({last, (last + 1) // 2, max(1, last // 4)}, reverse=True)
        fixed = usual if grid.passes is None else grid.passes
        if too_many := [n for n in fixed if n > last]:
            raise UserError(
                f"{self.entry.run} makes {last} passes, so that {too_many[0]} cannot be compared: "
                "lower grid.passes."
            )
        found = [
            OperatingPoint(f"{n} pass{'es' * (n > 1)}", {"passes": n}, "fixed depth") for n in fixed
        ]
        if self.model.has_halting:
            values = [0.95, 0.8, 0.5] if grid.threshold is None else grid.threshold
            found += [OperatingPoint(f"halt {v:g}", {"threshold": v}) for v in values]
        values = [0.99, 0.9] if grid.confidence is None else grid.confidence
        found += [OperatingPoint(f"sure {v:g}", {"confidence": v}, "confidence") for v in values]
        for point in found:
            _policy(point)  # refused before the first is measured
        run = f"{shlex.quote(self.entry.run)}{self.where}"
        return [replace(point, command=_command(run, point)) for point in found]

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> list[PonderOutput]:
        policy = _policy(point)
        return [self.model(**batch, policy=policy) for batch in self.batches]

    def judge(self, point: OperatingPoint, answers: list[PonderOutput]) -> Scores:
        logits = [output.logits for output in answers if output.logits is not None]
        right = torch.cat(logits).argmax(-1) == self.labels
        trace = DepthTrace.join([output.trace for output in answers if output.trace is not None])
        return Scores(
            quality=share_interval(int(right.sum()), len(right)),
            units=len(right),
            layers=trace.mean_blocks,
            flops=trace.total_flops,
        )


def _split(texts: LabelledTexts, asked: str | None) -> str:
    """The one asked for; else one with labels that was not trained on, if there is one."""
    if asked is None:
        return next(name for name in ("valid", "test", "train") if name in texts.splits)
    if asked not in texts.splits:
        known = ", ".join(texts.splits)
        raise UserError(f"The data set {texts.name} has no split {asked!r}: it has {known}.")
    return asked


def _command(run: str, point: OperatingPoint) -> str:
    ((kind, value),) = point.settings.items()
    flags = FLAGS[kind].format(value=value)
    return f"deepenough ponder eval {run} {flags}"


def _policy(point: OperatingPoint) -> ExitPolicy:
    ((kind, value),) = point.settings.items()
    return POLICIES[kind](value)
