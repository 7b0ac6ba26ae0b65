"""`deepenough derive`: read the pattern out of a search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from deepenough.cli.parse import parse


@dataclass
class DeriveSettings:
    """Derive"""

    run: str
    """Folder of the search."""

    budget: float | None = None
    """Largest cost of the pattern, as a share of the interleaved baseline's."""

    spend: float = 0.0
    """Least share of the budget that the pattern uses."""

    json: bool = False
    """Print one JSON object instead of a sentence."""


def main(argv: list[str]) -> int:
    settings = parse(
        "derive",
        DeriveSettings,
        argv,
        description="The likeliest block pattern of a search, within a budget if one is given.",
        example="deepenough derive --run runs/mine --budget 0.65",
    )
    from deepenough.par.training import derive_run
    from deepenough.runs import RunFolder

    found = derive_run(RunFolder.open(settings.run), settings.budget, settings.spend)
    if settings.json:
        content = {"pattern": found.pattern, "relative_cost": found.relative_cost}
        print(json.dumps(content | {"pi": found.probabilities}))
        return 0
    cost = f" at {found.relative_cost:.0%} of the baseline's cost" if found.relative_cost else ""
    print(f"{found.pattern}{cost}")
    budget = "" if settings.budget is None else f" --budget {settings.budget:g}"
    budget += f" --spend {settings.spend:g}" if settings.spend else ""
    run = RunFolder(Path(settings.run))
    if run.derived.exists():
        print(f"{run.derived} holds an earlier model: move it away before the next command")
    config = quote(str(run.config))
    print(f"next: deepenough search --config {config} --resume --retrain scratch{budget}")
    return 0
