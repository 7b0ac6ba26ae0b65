"""Classification of texts as a task of the training loop, for every model that ponders.

The baselines are the same model with another objective: `last` is plain fine-tuning at full depth,
`weighted` is PABEE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from deepenough.data.classification import ClassificationData
from deepenough.data.encoded_examples import EncodedExamples
from deepenough.data.length_batches import LengthBatches
from deepenough.errors import UserError
from deepenough.ponder.config import OPTIONS
from deepenough.ponder.measure import all_passes, quality
from deepenough.ponder.model import PonderClassifier
from deepenough.training.config import TrainingConfig
from deepenough.training.logging import without_bars
from deepenough.training.task import WEIGHTS, BatchLoss, PlainTask


class ClassificationTask(PlainTask):
    unit = "examples"

    def __init__(
        self,
        model: PonderClassifier,
        tokenizer: Any,
        examples: Mapping[str, EncodedExamples],
        data: ClassificationData,
        train: TrainingConfig,
        accelerator: Accelerator,
        head_lr: float = 1.0,
    ) -> None:
        self.model, self.tokenizer, self.examples = model, tokenizer, examples
        self.data, self.train, self.head_lr = data, train, head_lr
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        training = examples["train"]
        self.batches = LengthBatches(training.lengths, data.batch_size, train.seed)
        if self.batches.batch_size % self.world_size:
            raise UserError(
                f"A batch of {self.batches.batch_size} examples cannot be dealt to "
                f"{self.world_size} processes: make data.batch_size a multiple of them."
            )
        self.terms: dict[str, float] = {}

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Matrices decay, vectors do not; heads are new and may learn faster than the encoder."""
        encoder = {id(parameter) for parameter in self.model.encoder_model.parameters()}
        groups: list[dict[str, Any]] = []
        for is_head in (False, True):
            own = [p for p in self.model.parameters() if (id(p) not in encoder) == is_head]
            scale = self.head_lr if is_head else 1.0
            groups += [
                {"params": [p for p in own if p.dim() > 1], "lr_scale": scale},
                {
                    "params": [p for p in own if p.dim() <= 1],
                    "lr_scale": scale,
                    "weight_decay": 0.0,
                },
            ]
        return {WEIGHTS: [group for group in groups if group["params"]]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        rows = self.batches.rows(step * self.train.accumulate + micro)
        # Every other one: neighbours are of a length, so processes get like work.
        own = rows[self.rank :: self.world_size]
        output = model(**self.examples["train"].batch(own, self.model.device))
        self.terms = {name: float(term.detach()) for name, term in output.terms.items()}
        return BatchLoss(output.loss, output.terms["task"], len(own))

    def train_values(self) -> dict[str, Any]:
        return self.terms

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Loss, accuracy and mean passes with the exit of the model's own settings."""
        examples = self.examples.get(split)
        if examples is None or not len(examples):
            return {}
        was_training = self.model.training
        answers = all_passes(self.model, examples, accelerator)
        self.model.train(was_training)
        return quality(answers, self.model.exit_policy())

    def identity(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model": {"architecture": config.model_type, "head_lr": self.head_lr}
            | {name: getattr(config, name) for name in OPTIONS if not name.startswith("exit")},
            "data": {"batch_size": self.data.batch_size, "max_length": self.data.max_length}
            | {split: _content(examples) for split, examples in self.examples.items()},
            "train": self.train.identity(),
        }

    def save(self, folder: Path) -> None:
        with without_bars():
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _content(examples: EncodedExamples) -> str:
    """What tells one set of examples from another."""
    digest = hashlib.blake2b(digest_size=8)
    for ids, label in zip(examples.columns["input_ids"], examples.labels, strict=True):
        digest.update(repr((ids, label)).encode())
    return f"{len(examples)} examples ({digest.hexdigest()})"
