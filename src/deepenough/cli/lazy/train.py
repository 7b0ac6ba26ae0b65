"""`deepenough lazy train`: train a model that updates only what still changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepenough.cli.parse import parse
from deepenough.lazy.tasks import TASKS, TRANSLATION, task_in, task_named
from deepenough.training.distributed import is_main_process


def main(argv: list[str]) -> int:
    name = _task(argv)
    task = task_named(name)
    others = ", ".join(f"--task {other} --help" for other in TASKS if other != name)
    settings: Any = parse(
        "lazy train",
        task.training,
        argv,
        description="Train a model whose steps update only what still changes, or a baseline.\n"
        f"These are the options of --task {name}; for those of others: {others}.",
        example="deepenough lazy train --config configs/lazy-multi30k.yaml",
    )
    run = task.train(settings)
    if is_main_process():
        then = "translate" if name == TRANSLATION else "eval"
        sentences = " < sentences.txt" if name == TRANSLATION else ""
        print(f"model in {run.model}; next: deepenough lazy {then} {run.path}{sentences}")
    return 0


def _task(argv: list[str]) -> str:
    """The task decides which options there are, so it is looked for before they are parsed."""
    given = {}
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in ("--task", "--config"):
            following = argv[place + 1] if place + 1 < len(argv) else ""
            given[flag] = value if equals else following
    if "--task" in given:
        return given["--task"]
    return task_in(Path(given["--config"])) if "--config" in given else TRANSLATION
