"""Train a classifier that ponders on labelled texts; the baselines differ only in `objective`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator

from deepenough.data.classification import (
    ClassificationData,
    LabelledTexts,
    open_classification,
)
from deepenough.data.encoded_examples import EncodedExamples
from deepenough.errors import UserError
from deepenough.ponder.classify import ClassificationTask
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.new_model import EncoderSettings, make_classifier
from deepenough.ponder.settings import PonderSettings
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import check_folder, training


@dataclass
class PonderTraining:
    """A classifier that learns when to stop."""

    run: RunSettings = field(default_factory=RunSettings)
    data: ClassificationData = field(default_factory=ClassificationData)
    model: EncoderSettings = field(default_factory=EncoderSettings)
    ponder: PonderSettings = field(default_factory=PonderSettings)
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            lr=1e-4, warmup=300, schedule="linear", valid_every=1000, save_every=1000
        )
    )
    epochs: float | None = 3.0
    """Rounds over the training examples; null to count train.steps instead."""

    head_lr: float = 5.0
    """Learning rate of the new heads, as a multiple of the encoder's."""


def train(settings: PonderTraining, texts: LabelledTexts | None = None) -> RunFolder:
    """Train a classifier on labelled texts, those of the settings unless they are given."""
    settings.train.check()
    if settings.epochs is not None and not settings.epochs > 0:
        raise UserError(f"epochs must be above 0: got {settings.epochs}.")
    if not settings.head_lr > 0:
        raise UserError(f"head_lr must be above 0: got {settings.head_lr}.")
    accelerator = make_accelerator(settings.train)
    check_folder(settings.run, accelerator)
    texts = texts or open_classification(settings.data)
    torch.manual_seed(settings.train.seed)
    model, tokenizer = make_classifier(settings.model, settings.ponder, texts.labels)
    settings, task = _task(settings, model, tokenizer, texts, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


def _task(
    settings: PonderTraining,
    model: PonderClassifier,
    tokenizer: Any,
    texts: LabelledTexts,
    accelerator: Accelerator,
) -> tuple[PonderTraining, ClassificationTask]:
    """The task, and the settings with the number of steps it takes."""
    examples = {
        split: EncodedExamples(rows, tokenizer, token_limit(model, settings.data), split)
        for split, rows in texts.splits.items()
    }
    task = ClassificationTask(
        model, tokenizer, examples, settings.data, settings.train, accelerator, settings.head_lr
    )
    if settings.epochs is not None:
        task.train = settings.train.for_epochs(settings.epochs, len(task.batches))
        settings = replace(settings, train=task.train)
    return settings, task


def token_limit(model: PonderClassifier, data: ClassificationData) -> int:
    """Tokens at which texts are cut: as asked for, but no more than the model can read."""
    return min(data.max_length, model.max_length or data.max_length)
