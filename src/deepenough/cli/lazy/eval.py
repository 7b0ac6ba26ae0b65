"""`deepenough lazy eval`: how good a model is at its task, how deep its tokens go, the cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepenough.cli.parse import parse
from deepenough.lazy.tasks import TRANSLATION, run_in, task_named, task_of_run


def main(argv: list[str]) -> int:
    task = task_named(task_of_run(run) if (run := _run(argv)) else TRANSLATION)
    settings: Any = parse(
        "lazy eval",
        task.evaluation,
        argv,
        description="Measure a model at the task it was trained for: BLEU with its signature,\n"
        "encoder steps, FLOPs and seconds of a translator; exact match of one that executes\n"
        "programs; perplexity of a language model. The options are those of the run's task:\n"
        "deepenough lazy eval RUN --help.",
        example="deepenough lazy eval runs/lazy-multi30k --search.epsilon 0.005",
        positional=["run"],
    )
    for name, value in task.evaluate(settings).items():
        _show(name, value)
    return 0


def _run(argv: list[str]) -> str | None:
    """The run, which decides which options there are."""
    if argv and not argv[0].startswith("-"):
        return argv[0]
    given = {}
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        given[flag] = value if equals else following
    if "--run" in given or "--config" not in given:
        return given.get("--run")
    return run_in(Path(given["--config"]))


def _show(name: str, value: Any) -> None:
    if isinstance(value, list):  # a table: its rows, one a line
        for row in value:
            print("  ".join(f"{key} {_number(part)}" for key, part in row.items()))
    else:
        print(f"{name.replace('_', ' '):24}{_number(value)}")


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, (int, float)) else str(value)
