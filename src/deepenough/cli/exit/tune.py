"""`deepenough exit tune`: a draft head for a model, trained on what the model writes."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.decoding.tune import ExitTune, tune_run
from deepenough.training.logging import reading


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
        tuned = tune_run(settings, progress)
    if tuned is None:
        print(f"{settings.model.name} has written; go on with --resume and --until head")
        return 0
    first = "carry" if settings.head.start is None else "where it began"
    found = {first: tuned.meta["before"], "tuned": tuned.meta["after"]}
    print("on held-out text:   first draft right   second, after it   accepted of two")
    for name, values in found.items():
        print(
            f"  {name:17}{values['agreement_1']:12.3f}{values['agreement_2']:19.3f}"
            f"{values['accepted']:18.3f}"
        )
    for row in tuned.choice.get("measured", [])[:5]:
        names = " + ".join(row["names"]) or "no drafts"
        print(
            f"  {names}, {row['num_draft_tokens']} at once: {row['tokens_per_second']:.1f} tokens/s"
        )
    print(f'use it: speculate(model, draft_model="{settings.run.folder}")')
    return 0
