"""`deepenough lazy ...`: train, measure and use models that update only what still changes."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING, Any

from deepenough.config import Command, load_yaml
from deepenough.errors import UserError

if TYPE_CHECKING:
    from deepenough.lazy.config import SweepConfig


SWEPT = (
    *("encoder_steps", "decoder_steps", "epsilon", "decoder_epsilon"),
    *("bleu", "exact", "perplexity"),
    *("encoder_depth", "encoder_flops", "encoder_seconds", "flops_per_token"),
)
"""Columns of the table that a sweep prints, where its task has them."""


def train(config: Any) -> str:
    """Train for the task of the settings and return what can be done next."""
    from deepenough.lazy import programs, training

    tasks: dict[str, tuple[Any, str, str]] = {
        "translation": (training.train_translation, "translate", " < sentences.txt"),
        "programs": (programs.train_programs, "eval", ""),
        "language": (training.train_language, "generate", " The"),
    }
    train_task, verb, rest = tasks[config.task]
    run = train_task(config)
    return f"model in {run.model}; next: deepenough lazy {verb} {quote(str(run.path))}{rest}"


def sweep(config: SweepConfig) -> Iterator[str]:
    """Yield the lines of a table of quality, depth and cost, one a measurement."""
    from deepenough.lazy.evaluation import sweep as measurements
    from deepenough.measurement import shown

    for number, point in enumerate(measurements(config)):
        columns = [name for name in SWEPT if name in point]
        if number == 0:
            yield "".join(f"{name.replace('_', ' '):>17}" for name in columns)
        yield "".join(f"{shown(point[name]):>17}" for name in columns)


def _train_config(argv: list[str]) -> type:
    """Return the settings of `train`: a task has options of its own."""
    from deepenough.lazy.config import train_config

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--task", "--config"):
        finder.add_argument(name, nargs="?")
    given, _ = finder.parse_known_args(argv)
    task = given.task
    if task is None and given.config is not None:
        # A file that cannot be read is refused when its settings are.
        with contextlib.suppress(UserError, TypeError, KeyError):
            task = load_yaml(given.config)["task"]
    return train_config(task)


COMMANDS = (
    Command(
        name="train",
        help="train a translator, program executor or language model",
        config=_train_config,
        run=train,
        description="Train a model whose steps update only what still changes, or a baseline.\n"
        "Each task has options of its own: --task translation --help, --task programs --help,\n"
        "--task language --help.",
        example="deepenough lazy train --config configs/lazy-multi30k.yaml",
    ),
    Command(
        name="eval",
        help="measure its quality, how deep its tokens go and what that costs",
        config="deepenough.lazy.config:LazyEvalConfig",
        run="deepenough.lazy.evaluation:evaluate",
        description="Measure a model at the task it was trained for: BLEU and chrF with their\n"
        "signatures, BLEU by length, encoder steps, FLOPs and seconds of a translator; exact\n"
        "match of a program executor; perplexity of a language model, and how many last words of\n"
        "passages it writes. What was written is kept in hypotheses.txt of the run.",
        example="deepenough lazy eval runs/lazy-multi30k --search.epsilon 0.005",
        positional=("run",),
    ),
    Command(
        name="translate",
        help="translate lines of text as they come",
        config="deepenough.lazy.config:TranslateConfig",
        run="deepenough.lazy.inference:translate",
        example="deepenough lazy translate runs/lazy-multi30k < sentences.txt",
        positional=("run", "file"),
    ),
    Command(
        name="generate",
        help="write text with a language model",
        config="deepenough.lazy.config:LazyGenerateConfig",
        run="deepenough.lazy.inference:continue_text",
        example="deepenough lazy generate runs/lazy-language 'The function returns'",
        positional=("run", "prompt"),
    ),
    Command(
        name="sweep",
        help="measure quality and cost at other steps and epsilons",
        config="deepenough.lazy.config:SweepConfig",
        run=sweep,
        description="Measure BLEU, exact match or perplexity over a grid of encoder and decoder\n"
        "steps, and of tokens that halt below some epsilons. The run's sweep.csv has all figures.",
        goes_on=True,
        example="deepenough lazy sweep runs/lazy-multi30k --encoder_steps [6,9] --beams 1",
        positional=("run",),
    ),
    Command(
        name="plot",
        help="draw how far each token still moves at each step, and what sweeps have found",
        config="deepenough.lazy.config:LazyPlotConfig",
        run="deepenough.lazy.inspection:inspect_run",
        draws="run",
        description="Draw gates and similarities token by step for a sentence and its\n"
        "translation, a program and what it prints, or a text; how alike its states are at any\n"
        "two steps; and what sweeps have found.",
        example='deepenough lazy plot runs/lazy-multi30k --source "A dog runs on the beach."',
        positional=("run",),
    ),
)
