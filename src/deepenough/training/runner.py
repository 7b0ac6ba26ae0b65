"""A training in its run folder, whatever the task: refuse first, then write, then begin or go on.

A folder is made, overwritten or changed only when all settings have been found good: a task is
built before `training` is entered, and a checkpoint is compared with it before anything is said.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from deepenough.config import dump
from deepenough.errors import UserError
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings, TrainSettings
from deepenough.training.distributed import on_main
from deepenough.training.log import log_to
from deepenough.training.task import Task
from deepenough.training.trainer import Trainer

logger = logging.getLogger("deepenough")


class Settings(Protocol):
    """The settings of a command that trains."""

    run: RunSettings
    train: TrainSettings


def check_folder(run: RunSettings, accelerator: Accelerator) -> None:
    """Refuse a run folder that is in the way before long work begins."""

    def check() -> None:
        RunFolder.check(run.folder, resume=run.resume, overwrite=run.overwrite)

    on_main(accelerator, check)


@contextlib.contextmanager
def training(settings: Settings, task: Task, accelerator: Accelerator) -> Iterator[Trainer]:
    """A trainer in its run folder, ready to begin or to go on."""
    run = RunFolder(Path(settings.run.folder))

    def begin() -> None:
        RunFolder.create(run.path, resume=settings.run.resume, overwrite=settings.run.overwrite)

    on_main(accelerator, begin)
    with contextlib.ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(log_to(run.log))
        trainer = Trainer(task, settings.train, run, accelerator)
        trainer.resume()
        if trainer.first < settings.train.steps:
            on_main(accelerator, lambda: _write_config(settings, run))
        else:  # what was trained stays described as it was
            logger.info("All %d steps are made already: nothing is trained.", trainer.first)
        yield trainer


def _write_config(settings: Any, run: RunFolder) -> None:
    # Given again as --config, it must neither resume nor delete anything by itself.
    kept = replace(settings, run=replace(settings.run, resume=False, overwrite=False))
    try:
        dump(kept, run.config)
    except OSError as error:
        raise UserError(f"{run.config} cannot be written: {error.strerror}.") from error
