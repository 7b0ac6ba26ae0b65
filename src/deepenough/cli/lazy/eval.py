"""`deepenough lazy eval`: BLEU of a translator, how deep its tokens go and what that costs."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.train.lazy_use import LazyEvaluation, evaluate


def main(argv: list[str]) -> int:
    settings = parse(
        "lazy eval",
        LazyEvaluation,
        argv,
        description="Measure a translator: BLEU with its signature, encoder steps, FLOPs, seconds.",
        example="deepenough lazy eval runs/lazy-multi30k --search.epsilon 0.05",
        positional=["run"],
    )
    for name, value in evaluate(settings).items():
        shown = f"{value:,.4g}" if isinstance(value, (int, float)) else str(value)
        print(f"{name.replace('_', ' '):24}{shown}")
    return 0
