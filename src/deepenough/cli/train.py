"""`deepenough train`: train a language model with fixed blocks."""

from __future__ import annotations

from shlex import quote

from deepenough.cli.parse import parse


def main(argv: list[str]) -> int:
    from deepenough.par.training import ParTraining, train
    from deepenough.training.distributed import is_main_process

    settings = parse(
        "train",
        ParTraining,
        argv,
        description="Train a language model with a given block pattern (default: interleaved).",
        example="deepenough train --corpus mytext.txt --pattern aadadd --folder runs/aadadd",
    )
    run = train(settings)
    if is_main_process():
        place = quote(str(run.path))
        print(f"model in {run.model}; next: deepenough generate --run {place} --prompt 'Once'")
    return 0
