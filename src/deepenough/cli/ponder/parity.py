"""`deepenough ponder parity`: PonderNet's experiment, with ACT and fixed depth beside it."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.ponder.parity import ParityTraining, train_parity
from deepenough.training.distributed import is_main_process


def main(argv: list[str]) -> int:
    settings = parse(
        "ponder parity",
        ParityTraining,
        argv,
        description="Train a recurrent network that chooses its number of steps on parity, and\n"
        "measure it on harder vectors than it was trained on.",
        example="deepenough ponder parity --steps 2000 --folder runs/parity",
    )
    run = train_parity(settings)
    if is_main_process():
        print(f"next: deepenough plot {run.path}")
    return 0
