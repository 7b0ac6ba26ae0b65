"""`deepenough exit tune`: a draft head for a model, trained on what the model writes."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.train.exit_tune import ExitTune, tune_run
from deepenough.train.progress import reading


def main(argv: list[str]) -> int:
    settings = parse(
        "exit tune",
        ExitTune,
        argv,
        description="Make a model ready for drafts: let it write, and learn to guess what it\n"
        "will write next. The model itself is not changed.",
        example="deepenough exit tune smollm2 --data mytext.txt --folder runs/tuned",
        positional=["model.name"],
    )
    with reading("tokens") as progress:
        texts = tune_run(settings, progress)
    print(f"{texts.num_new} tokens of {settings.model.name} in {settings.run.folder}")
    return 0
