"""Make a model ready for drafts, step by step in one run folder; the model itself is not changed.

1. *text*: the model writes (`exit_tune_text.py`), states and all, into `checkpoints/text`;

Every step goes on where an interrupted command stopped it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Literal

import torch

from deepenough.runs import RunFolder
from deepenough.settings import dump
from deepenough.train.allocator import keep_freed_memory
from deepenough.train.exit_tune_text import OwnTexts, OwnTextSettings, write_texts
from deepenough.train.settings import RunSettings, TrainSettings
from deepenough.train.shortcut import ModelChoice

Progress = Callable[[int, int | None], None]


def default_training() -> TrainSettings:
    return TrainSettings(
        lr=1e-3, warmup=50, weight_decay=0.05, precision="fp32", valid_every=250, save_every=100
    )


@dataclass
class ExitTune:
    """Make a model ready for drafts."""

    model: ModelChoice = field(default_factory=ModelChoice)
    run: RunSettings = field(default_factory=lambda: RunSettings(folder="runs/tuned"))
    text: OwnTextSettings = field(default_factory=OwnTextSettings)
    until: Literal["text"] = "text"
    """Last step to take."""

    train: TrainSettings = field(default_factory=default_training)


def tune_run(settings: ExitTune, progress: Progress | None = None) -> OwnTexts:
    """All steps, in a run folder; interrupted, they go on with `run.resume`."""
    keep_freed_memory()
    settings.text.check()
    settings.text.lines()
    settings.train.check()
    place, resume, overwrite = astuple(settings.run)
    RunFolder.check(place, resume=resume, overwrite=overwrite)
    if settings.train.threads is not None:
        torch.set_num_threads(settings.train.threads)
    model, tokenizer = settings.model.load()
    run = RunFolder.create(place, resume=resume, overwrite=overwrite)
    dump(settings, run.config)
    folder = run.checkpoints / "text"
    return write_texts(folder, model, tokenizer, settings.text, settings.train.seed, progress)
