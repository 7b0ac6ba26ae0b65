"""`deepenough ponder eval`: accuracy against passes, and the seconds that stopping saves."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.ponder.evaluation import PonderEvaluation, evaluate


def main(argv: list[str]) -> int:
    settings = parse(
        "ponder eval",
        PonderEvaluation,
        argv,
        description="Measure a classifier that ponders: accuracy, passes, seconds.",
        example="deepenough ponder eval runs/ponder --exit.threshold 0.7",
        positional=["run"],
    )
    for name, value in evaluate(settings.run, settings.dataset, settings).items():
        shown = f"{value:,.4g}" if isinstance(value, (int, float)) else str(value)
        print(f"{name.replace('_', ' '):24}{shown}")
    print(f"next: deepenough plot {settings.run}")
    return 0
