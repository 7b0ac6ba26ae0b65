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

from deepenough.config import RunConfig, dump
from deepenough.errors import UserError
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import on_main
from deepenough.training.log import log_to
from deepenough.training.task import Task
from deepenough.training.trainer import Trainer

logger = logging.getLogger("deepenough")


class Settings(Protocol):
    """The settings of a command that trains: where the run goes (`RunConfig`), and `train`."""

    train: TrainingConfig


def place_of(settings: Any) -> RunConfig:
    """Return where a run goes; provisional, until no settings have a section `run` any more."""
    run = getattr(settings, "run", settings)
    if isinstance(run, RunSettings):
        return RunConfig(run.folder, run.resume, run.overwrite)
    return RunConfig(run.out, run.resume, run.overwrite)


def check_folder(run: Any, accelerator: Accelerator) -> None:
    """Refuse a run folder that is in the way before long work begins."""
    place = place_of(run)

    def check() -> None:
        RunFolder.check(place.out, resume=place.resume, overwrite=place.overwrite)

    on_main(accelerator, check)


@contextlib.contextmanager
def training(settings: Settings, task: Task, accelerator: Accelerator) -> Iterator[Trainer]:
    """A trainer in its run folder, ready to begin or to go on."""
    place = place_of(settings)
    run = RunFolder(Path(place.out))

    def begin() -> None:
        RunFolder.create(run.path, resume=place.resume, overwrite=place.overwrite)

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
    if isinstance(settings, RunConfig):
        kept = replace(settings, resume=False, overwrite=False)
    else:
        kept = replace(settings, run=replace(settings.run, resume=False, overwrite=False))
    try:
        dump(kept, run.config)
    except OSError as error:
        raise UserError(f"{run.config} cannot be written: {error.strerror}.") from error
