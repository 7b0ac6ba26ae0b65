"""`deepenough lazy train`: train a translator that updates only what still changes."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.train.lazy import LazyTraining, train
from deepenough.train.processes import is_main_process


def main(argv: list[str]) -> int:
    settings = parse(
        "lazy train",
        LazyTraining,
        argv,
        description="Train a translator whose steps update only what still changes, or a baseline.",
        example="deepenough lazy train --config configs/lazy-multi30k.yaml",
    )
    run = train(settings)
    if is_main_process():
        print(f"model in {run.model}; next: deepenough lazy translate {run.path} < sentences.txt")
    return 0
