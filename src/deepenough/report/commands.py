"""The commands `deepenough report` and `deepenough METHOD plot`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepenough.config import Command
from deepenough.errors import UserError


@dataclass
class PlotConfig:
    """What is drawn, and where to."""

    runs: list[str] = field(default_factory=list)
    """Run folder; of several, the training curves are drawn over one another."""

    out: str | None = None
    """Folder for the pictures; by default plots in the run."""


@dataclass
class ReportConfig:
    """What is reported, and where to."""

    runs: list[str] = field(default_factory=list)
    """Folders of runs, or of deepenough compare."""

    out: str = "report.html"
    """File to write: report.html, or report.md for Markdown with pictures."""

    title: str = ""
    """Heading; by default the names of the runs."""


def plot(config: PlotConfig) -> None:
    """Draw the figures of a run, or the curves of several, and print the files written."""
    folders = _distinct(config.runs, "deepenough par plot runs/first")
    if len(folders) > 1 and config.out is None:
        raise UserError("Several runs are drawn over one another; say with --out FOLDER where to.")

    # Here, not above: matplotlib takes a second to load, which --help need not wait for.
    from deepenough.figure import read_run
    from deepenough.report.drawing import save_figures
    from deepenough.report.figures import compared_curves, run_figures
    from deepenough.runs import RunFolder

    runs = [read_run(folder) for folder in folders]
    _print_notes([note for run in runs for note in run.notes])
    figures = run_figures(runs[0]) if len(runs) == 1 else compared_curves(runs)
    if not figures:
        raise UserError(
            f"{', '.join(folders)}: nothing is recorded that can be drawn; name the folder of a "
            "search, a training or an evaluation, or several of trainings."
        )
    print(*save_figures(figures, config.out or RunFolder.open(folders[0]).plots), sep="\n")


def report(config: ReportConfig) -> None:
    """Write a report and print the files written."""
    folders = _distinct(config.runs, "deepenough report runs/first --out report.html")
    out = Path(config.out)
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file, as in --out {out}/report.html.")

    from deepenough.report.page import read_report, write_markdown, write_page

    found = read_report(folders, config.title)
    _print_notes(found.notes)
    if out.suffix.lower() in (".md", ".markdown"):
        print(*write_markdown(found, out), sep="\n")
    else:
        write_page(found, out)
        print(out)


def _distinct(paths: list[str], example: str) -> list[str]:
    """Return the folders of runs without repetitions: a run's own model stands for the run."""
    from deepenough.runs import RunFolder

    found: dict[Path, str] = {}
    for path in map(Path, paths):
        parent = RunFolder(path.parent)
        folder = parent.path if path == parent.model and parent.is_run() else path
        found.setdefault(folder.resolve(), str(folder))
    if not found:
        raise UserError(f"Name at least one run folder, as in {example}.")
    return list(found.values())


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"deepenough: note: {note}", file=sys.stderr)


def plot_command(method: str) -> Command:
    """Return the command `deepenough METHOD plot`, which every method has."""
    return Command(
        name="plot",
        help="draw the figures of a run",
        config=PlotConfig,
        run=plot,
        description="Draw all that a run has recorded, as PNG, PDF and SVG, each with its data as "
        "JSON.\nOf several runs the training curves are drawn over one another.",
        example=f"deepenough {method} plot runs/first --out pictures",
        positional=("runs*",),
    )


REPORT = Command(
    name="report",
    help="put all that runs have recorded into one page",
    config=ReportConfig,
    run=report,
    description="Put all that runs have recorded, and comparisons measured, into one page that\n"
    "opens without a network, or into Markdown with pictures.",
    example="deepenough report runs/demo/* --out report.html",
    positional=("runs*",),
)
