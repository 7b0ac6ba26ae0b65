"""Train a Lazy Transformer, or one of its baselines, to translate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from accelerate import Accelerator

from deepenough.data.translation import ParallelText, TranslationData, open_parallel
from deepenough.data.translation_pairs import EncodedPairs, encode_pairs, joint_tokenizer
from deepenough.errors import UserError
from deepenough.lazy import LazyTransformerConfig, LazyTransformerForConditionalGeneration
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.translate import TranslationTask
from deepenough.lazy.translate_score import SearchSettings
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import check_folder, training


@dataclass
class LazyTraining:
    """A translator that updates only what still changes."""

    task: Literal["translation"] = "translation"
    """What is learned: translation, programs or language; each has options of its own."""

    run: RunSettings = field(default_factory=RunSettings)
    data: TranslationData = field(default_factory=TranslationData)
    model: LazySettings = field(default_factory=LazySettings)
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            lr=1.5e-3, warmup=1000, weight_decay=0.01, betas=[0.9, 0.98]
        )
    )
    search: SearchSettings = field(default_factory=SearchSettings)
    epochs: float | None = 30.0
    """Rounds over the training pairs, which decide train.steps; null to count these instead."""

    fewest_encoder_steps: int | None = None
    """Let every batch draw its encoder steps, from these to model.encoder_steps; by default all
    batches make the latter. What was trained with many numbers of steps bears others better."""

    def check(self) -> None:
        self.train.check()
        self.data.check()
        self.search.check()
        if self.epochs is not None and not self.epochs > 0:
            raise UserError(f"epochs must be above 0: got {self.epochs}.")
        fewest, most = self.fewest_encoder_steps, self.model.encoder_steps
        if fewest is not None and not 1 <= fewest <= most:
            raise UserError(
                f"fewest_encoder_steps must be from 1 to model.encoder_steps ({most}): "
                f"got {fewest}."
            )


def train(settings: LazyTraining) -> RunFolder:
    settings.check()
    accelerator = make_accelerator(settings.train, may_skip=False)
    check_folder(settings.run, accelerator)
    text = open_parallel(settings.data)
    tokenizer = joint_tokenizer(text, settings.data)
    pairs = encode_splits(text, tokenizer, settings.data.max_length)
    torch.manual_seed(settings.train.seed)
    model = make_model(settings.model, tokenizer, settings.data.max_length)
    settings.search.check_for(model)
    settings, task = _task(settings, model, tokenizer, pairs, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


def encode_splits(text: ParallelText, tokenizer: Any, max_length: int) -> dict[str, EncodedPairs]:
    """All splits, the text kept of those that are measured on."""
    return {
        split: encode_pairs(
            text.pairs(split),
            tokenizer,
            max_length,
            f"{text.name}, {split}",
            keep=split != "train",
        )
        for split in text.splits
    }


def make_model(
    settings: LazySettings, tokenizer: Any, max_length: int
) -> LazyTransformerForConditionalGeneration:
    """A new model; its weights are drawn from torch's generator."""
    config = LazyTransformerConfig(
        vocab_size=len(tokenizer),
        # Translations may be twice as long as their sources.
        max_positions=2 * max_length + 16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **asdict(settings),
    )
    return LazyTransformerForConditionalGeneration(config)


def _task(
    settings: LazyTraining,
    model: LazyTransformerForConditionalGeneration,
    tokenizer: Any,
    pairs: dict[str, EncodedPairs],
    accelerator: Accelerator,
) -> tuple[LazyTraining, TranslationTask]:
    """The task, and the settings with the number of steps it takes."""
    task = TranslationTask(
        model,
        tokenizer,
        pairs,
        settings.data,
        settings.train,
        settings.search,
        accelerator,
        settings.fewest_encoder_steps,
    )
    if settings.epochs is not None:
        task.train = settings.train.for_epochs(settings.epochs, len(task.batches))
        settings = replace(settings, train=task.train)
    return settings, task
