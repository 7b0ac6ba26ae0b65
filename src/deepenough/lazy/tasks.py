"""What a Lazy Transformer can be trained for, each task with its settings, training and measure.

A task has options of its own, so it decides which settings a command takes; a run folder tells
which it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deepenough.errors import UserError
from deepenough.lazy import evaluation, language, programs_training, programs_use, training
from deepenough.runs import RunFolder

TRANSLATION = "translation"


class LazyTask(NamedTuple):
    training: type
    """Settings of its training."""
    train: Callable[[Any], RunFolder]
    evaluation: type
    """Settings of its measurement."""
    evaluate: Callable[[Any], dict[str, Any]]


TASKS = {
    TRANSLATION: LazyTask(
        training.LazyTraining, training.train, evaluation.LazyEvaluation, evaluation.evaluate
    ),
    "programs": LazyTask(
        programs_training.ProgramTraining,
        programs_training.train_programs,
        programs_use.ProgramEvaluation,
        programs_use.evaluate_programs,
    ),
    "language": LazyTask(
        language.LanguageTraining,
        language.train_language,
        language.LanguageEvaluation,
        language.evaluate,
    ),
}


def task_named(name: str) -> LazyTask:
    if name not in TASKS:
        raise UserError(f"There is no task {name!r}: choose {', '.join(TASKS)}.")
    return TASKS[name]


def task_in(config: Path) -> str:
    """The task that a settings file names; translation where it names none."""
    return str(_content(config).get("task", TRANSLATION))


def run_in(config: Path) -> str | None:
    """The run that a settings file names."""
    run = _content(config).get("run")
    return run if isinstance(run, str) else None


def _content(config: Path) -> dict[str, Any]:
    if not config.is_file():
        return {}
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # what is wrong with the file is said by whoever reads its settings
    return content if isinstance(content, dict) else {}


def task_of_run(run: str) -> str:
    """The task that a run was trained for; what is wrong with a run is said when it is read."""
    path = Path(run)
    return task_in(RunFolder(path.parent if (path / "config.json").is_file() else path).config)
