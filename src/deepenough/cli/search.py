"""`deepenough search`: find the blocks a language model needs."""

from __future__ import annotations

from shlex import quote

from deepenough.cli.parse import parse


def main(argv: list[str]) -> int:
    from deepenough.par.training import ParSearch, search
    from deepenough.training.distributed import is_main_process

    settings = parse(
        "search",
        ParSearch,
        argv,
        description="Train a SuperNet that chooses its blocks, and derive the pattern it found.",
        example="deepenough search --corpus mytext.txt --folder runs/mine --budget 0.65",
    )
    found = search(settings)
    if not is_main_process():
        return 0
    share = found.relative_cost
    cost = "" if share is None else f", {share:.0%} of the baseline's cost"
    print(f"pattern {found.pattern}{cost}; next: deepenough plot {quote(settings.out)}")
    return 0
