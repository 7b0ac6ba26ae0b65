"""`deepenough lazy plot`: how far each token still moves at each step, and when it rests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepenough.cli.parse import parse
from deepenough.lazy.look import LazyPlot, look
from deepenough.runs import RunFolder, model_folder


@dataclass
class PlotSettings(LazyPlot):
    """Look inside a model that translates or executes programs, and draw it."""

    out: str | None = None
    """Folder for the pictures; by default plots in the run."""


def main(argv: list[str]) -> int:
    settings = parse(
        "lazy plot",
        PlotSettings,
        argv,
        description="Draw gates and similarities token by step for a sentence and its\n"
        "translation, or a program and what it prints; when tokens come to rest; and what\n"
        "sweeps have found.",
        example='deepenough lazy plot runs/lazy-multi30k --source "A dog runs on the beach."',
        positional=["run"],
    )
    # Here, not above: matplotlib takes a second to load, which --help need not wait for.
    from deepenough.report import read_run
    from deepenough.report.lazy import write_lazy_figures

    # What is no run is refused before anything is looked at.
    run = RunFolder.open(model_folder(settings.run).parent)
    look(settings)
    folder = Path(settings.out) if settings.out else run.plots
    print(*write_lazy_figures(read_run(run.path), folder), sep="\n")
    return 0
