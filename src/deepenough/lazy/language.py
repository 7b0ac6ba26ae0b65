"""Language modelling with a Lazy Transformer, by the language task of the house.

The model carries nothing from one batch to the next, so it predicts within segments of
`data.length` tokens; its steps are `model.decoder_steps`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from deepenough.config import resolve
from deepenough.data.config import DatasetConfig
from deepenough.data.corpus import open_corpus
from deepenough.data.prepare import Prepared, prepare
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import token_file
from deepenough.errors import UserError
from deepenough.lazy import LazyTransformerConfig, LazyTransformerForCausalLM
from deepenough.lazy.evaluation import keep_record
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.task import model_identity
from deepenough.runs import RunFolder, model_folder
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator, on_main
from deepenough.training.language import LanguageTask, evaluate_language
from deepenough.training.logging import without_bars
from deepenough.training.task import BatchLoss
from deepenough.training.trainer import check_folder, training

EVALUATION = "language"
"""Kind of the records that tell perplexity of one setting."""


@dataclass
class LanguageTraining:
    """A language model that updates only what still changes."""

    task: Literal["language"] = "language"
    """What is learned: translation, programs or language; each has options of its own."""

    run: RunSettings = field(default_factory=RunSettings)
    data: str = "python"
    """Text: a file, folder or glob, `python`, or a `datasets` name."""
    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(length=64))
    model: LazySettings = field(
        default_factory=lambda: LazySettings(decoder_steps=6, label_smoothing=0.0)
    )
    train: TrainingConfig = field(default_factory=TrainingConfig)


def train_language(settings: LanguageTraining) -> RunFolder:
    settings.train.check()
    accelerator = make_accelerator(settings.train, may_skip=False)
    check_folder(settings.run, accelerator)
    found: list[Prepared] = []
    on_main(
        accelerator, lambda: found.append(prepare(settings.data, settings.dataset))
    )  # fills the cache for all
    prepared = found[0] if found else prepare(settings.data, settings.dataset)
    torch.manual_seed(settings.train.seed)
    roles = ("bos", "eos", "pad")
    config = LazyTransformerConfig(
        vocab_size=len(prepared.tokenizer),
        max_positions=max(1024, settings.dataset.length),
        **{f"{role}_token_id": getattr(prepared.tokenizer, f"{role}_token_id") for role in roles},
        **asdict(settings.model),
    )
    model = LazyTransformerForCausalLM(config)
    task = LazyLanguageTask(model, prepared, settings.dataset, settings.train, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


class LazyLanguageTask(LanguageTask):
    def __init__(
        self,
        model: Any,
        prepared: Prepared,
        data: DatasetConfig,
        train: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(model, prepared, data, train, accelerator)

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """The plain loss is recorded, as labels may be smoothed."""
        batches = self.batches[phase]
        batch = batches[(step * self.train.accumulate + micro) % len(batches)]
        device = self.model.device
        targets = batch["labels"].to(device)
        output = model(batch["input_ids"].to(device), targets=targets)
        return BatchLoss(output.loss, output.plain_loss, targets.numel())

    def identity(self) -> dict[str, Any]:
        config: Any = self.model.config
        tokens = self.prepared.tokens.items()
        return {
            "model": model_identity(config),
            "data": {"batch_size": self.data.batch_size, "length": self.data.length}
            # The folder's name is a hash of the text and its tokenizer.
            | {split: f"{len(file)} tokens ({file.folder.name})" for split, file in tokens},
            "train": self.train.identity(),
        }


@dataclass
class LanguageEvaluation:
    """Measure a language model."""

    run: str
    """Folder of a finished training."""

    split: str = "test"
    """Split of the text that it was trained on."""

    decoder_steps: int | None = None
    """Steps over the text; by default those of training."""

    decoder_epsilon: float | None = None
    """Gate (or turn, as the model rests by) below which a token stops being updated; 0 lets none
    stop."""

    patience: int | None = None
    """Steps in a row for which it must be below."""

    def check(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise UserError(f"patience must be at least 1: got {self.patience}.")


def evaluate(settings: LanguageEvaluation) -> dict[str, Any]:
    """Perplexity, bits per byte and FLOPs per token; recorded in the run."""
    settings.check()
    folder = model_folder(settings.run)
    try:
        with without_bars():
            model: Any = LazyTransformerForCausalLM.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"The model in {settings.run} cannot be loaded: {reason}.") from error
    names = ("decoder_steps", "decoder_epsilon", "patience")
    chosen = {name: getattr(settings, name) for name in names}
    for name, value in chosen.items():
        if value is not None:
            setattr(model.config, name, value)
    trained = resolve(LanguageTraining, RunFolder(folder.parent).config)
    text, data = trained.data, trained.dataset
    corpus = open_corpus(
        text,
        valid_fraction=data.valid_fraction,
        test_fraction=data.test_fraction,
        cache=data.cache,
    )
    if settings.split not in corpus.splits:
        known = ", ".join(corpus.splits)
        raise UserError(f"{text} has no split {settings.split!r}: it has {known}.")
    own_end = data.tokenizer is None if data.end_of_line is None else data.end_of_line
    tokens = token_file(
        corpus,
        settings.split,
        load_tokenizer(str(folder)),
        end_of_line=own_end,
        cache_dir=data.cache,
    )
    started = time.perf_counter()
    values: dict[str, Any] = dict(evaluate_language(model, tokens, data))
    values["seconds"] = time.perf_counter() - started
    values |= {"split": settings.split, "mechanism": model.config.mechanism}
    values |= {name: getattr(model.config, name) for name in names}
    keep_record(settings.run, EVALUATION, values)
    return values
