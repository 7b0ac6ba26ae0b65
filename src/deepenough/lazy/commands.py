"""`deepenough lazy ...`: train, measure and use models that update only what still changes."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepenough.config import Command, load_yaml
from deepenough.errors import UserError
from deepenough.runs import RunFolder

if TYPE_CHECKING:
    from deepenough.lazy.config import LazyEvalConfig, LazyPlotConfig, SweepConfig, TranslateConfig


def train(config: Any) -> None:
    """Train for the task of the settings and say what can be done next."""
    from deepenough.lazy import programs, training
    from deepenough.training.distributed import is_main_process

    trainers: dict[str, Callable[[Any], RunFolder]] = {
        "translation": training.train_translation,
        "programs": programs.train_programs,
        "language": training.train_language,
    }
    run = trainers[config.task](config)
    if is_main_process():
        is_translator = config.task == "translation"
        verb, sentences = ("translate", " < sentences.txt") if is_translator else ("eval", "")
        print(f"model in {run.model}; next: deepenough lazy {verb} {run.path}{sentences}")


def evaluate(config: LazyEvalConfig) -> None:
    """Measure a model at the task it was trained for and print the figures."""
    from deepenough.lazy import evaluation, programs
    from deepenough.measurement import figure_lines

    evaluations: dict[str, Callable[[LazyEvalConfig], dict[str, Any]]] = {
        "translation": evaluation.evaluate_translation,
        "programs": programs.evaluate_programs,
        "language": evaluation.evaluate_language,
    }
    task = evaluation.task_of(config.run)
    config.check_task(task)
    print(*figure_lines(evaluations[task](config)), sep="\n")


def translate(config: TranslateConfig) -> None:
    """Print the translation of every line."""
    from deepenough.data.corpus import read_input_lines
    from deepenough.lazy.evaluation import load_translator, translate_lines

    translator = load_translator(config.run)
    lines = read_input_lines(config.file)
    for translation in translate_lines(translator, lines, config.search, config.rows):
        print(translation, flush=True)


def sweep(config: SweepConfig) -> None:
    """Print a table of BLEU, depth and cost, one line per measurement."""
    from deepenough.lazy.evaluation import sweep as measurements

    print(f"{'encoder':>8}{'decoder':>8}{'BLEU':>8}{'depth':>8}{'GFLOPs':>10}{'seconds':>9}")
    for point in measurements(config):
        steps = f"{point['encoder_steps']:8}{point['decoder_steps']:8}{point['bleu']:8.2f}"
        cost = f"{point['encoder_flops'] / 1e9:10.2f}{point['encoder_seconds']:9.2f}"
        print(f"{steps}{point['encoder_depth']:8.2f}{cost}", flush=True)


def inspect(config: LazyPlotConfig) -> None:
    """Look inside a run's model and record what was found, for its figures."""
    from deepenough.lazy.evaluation import inspect_run

    inspect_run(config)


# -- which task ------------------------------------------------------------------------------------
# A task has options of its own, so it decides which settings `train` takes.


def _train_config(argv: list[str]) -> type:
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
        run=evaluate,
        description="Measure a model at the task it was trained for: BLEU with its signature,\n"
        "encoder steps, FLOPs and seconds of a translator; exact match of a program executor;\n"
        "perplexity of a language model.",
        example="deepenough lazy eval runs/lazy-multi30k --search.epsilon 0.005",
        positional=("run",),
    ),
    Command(
        name="translate",
        help="translate lines of text as they come",
        config="deepenough.lazy.config:TranslateConfig",
        run=translate,
        description="Translate sentences, one per line, with a finished model.",
        example="deepenough lazy translate runs/lazy-multi30k < sentences.txt",
        positional=("run", "file"),
    ),
    Command(
        name="sweep",
        help="measure BLEU for other numbers of steps",
        config="deepenough.lazy.config:SweepConfig",
        run=sweep,
        description="Measure BLEU over a grid of encoder and decoder steps.",
        goes_on=True,
        example="deepenough lazy sweep runs/lazy-multi30k --encoder_steps [6,9] --beams 1",
        positional=("run",),
    ),
    Command(
        name="plot",
        help="draw how far each token still moves at each step, and what sweeps have found",
        config="deepenough.lazy.config:LazyPlotConfig",
        run=inspect,
        draws="run",
        description="Draw gates and similarities token by step for a sentence and its\n"
        "translation, or a program and what it prints; and what sweeps have found.",
        example='deepenough lazy plot runs/lazy-multi30k --source "A dog runs on the beach."',
        positional=("run",),
    ),
)
