"""`deepenough ponder train`: fine-tune an encoder that learns when to stop."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.ponder.training import PonderTraining, train
from deepenough.training.distributed import is_main_process


def main(argv: list[str]) -> int:
    settings = parse(
        "ponder train",
        PonderTraining,
        argv,
        description="Fine-tune an encoder as a classifier that stops as soon as it is sure.",
        example="deepenough ponder train --dataset reviews.csv --folder runs/ponder",
    )
    run = train(settings)
    if is_main_process():
        print(f"model in {run.model}; next: deepenough ponder eval {run.path}")
    return 0
