"""Commands of the toy."""

from __future__ import annotations

from typing import Any

from deepenough.config import Command


def _train(config: Any) -> str:
    from deepenough.toy.training import train

    return f"model in {train(config).model}"


def _evaluate(config: Any) -> None:
    from deepenough.toy.evaluation import evaluate

    print(f"error {evaluate(config):.4f}")


COMMANDS = (
    Command(
        name="train",
        help="find the slope of a line",
        config="deepenough.toy.config:ToyTrainConfig",
        run=_train,
        description="Train the toy.",
        example="deepenough toy train --out runs/toy",
    ),
    Command(
        name="eval",
        help="measure the toy's error",
        config="deepenough.toy.config:ToyEvalConfig",
        run=_evaluate,
        description="Measure the toy.",
        example="deepenough toy eval runs/toy",
        positional=("run",),
    ),
)
