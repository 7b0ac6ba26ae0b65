"""The commands `deepenough report` and `deepenough METHOD plot`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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

    out: str | None = None
    """File to write: report.html, or report.md for Markdown with pictures."""

    format: Literal["html", "markdown"] | None = None
    """By default as the name of the file ends."""

    title: str = ""
    """Heading; by default the names of the runs."""


def plot(config: PlotConfig) -> None:
    """Draw the figures of a run, or the curves of several, and print the files written."""
    folders = _distinct(config.runs, "deepenough par plot runs/first")
    if len(folders) > 1 and config.out is None:
        raise UserError("Several runs are drawn over one another; say with --out FOLDER where to.")

    # Here, not above: matplotlib takes a second to load, which --help need not wait for.
    from deepenough.figure import read_runs
    from deepenough.report.saving import write_comparison, write_figures
    from deepenough.runs import RunFolder

    runs = read_runs(folders)
    _print_notes([note for run in runs for note in run.notes])
    if len(runs) > 1:
        written = write_comparison(runs, str(config.out))
    else:
        written = write_figures(runs[0], config.out or RunFolder(Path(folders[0])).plots)
    print(*written, sep="\n")


def report(config: ReportConfig) -> None:
    """Write a report and print the files written."""
    folders = _distinct(config.runs, "deepenough report runs/first --out report.html")
    out = None if config.out is None else Path(config.out)
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder: name a file, as in --out {out}/report.html.")

    from deepenough.report.page import read_sources, write_markdown, write_page

    sources = read_sources(folders)
    _print_notes(sources.notes)
    markdown = out is not None and out.suffix.lower() in (".md", ".markdown")
    if config.format == "markdown" or (markdown and config.format is None):
        print(*write_markdown(sources, out or "report.md", config.title), sep="\n")
    else:
        print(write_page(sources, out or "report.html", config.title))


def _distinct(paths: list[str], example: str) -> list[str]:
    """Return the folders without repetitions: one run twice would be a line drawn over itself."""
    runs = [_run_of(path) for path in paths]
    folders = list({Path(path).resolve(): path for path in runs}.values())
    if not folders:
        raise UserError(f"Name at least one run folder, as in {example}.")
    return folders


def _run_of(path: str) -> str:
    """Return the folder of the run if `path` is the model inside of one."""
    from deepenough.runs import RunFolder

    folder = Path(path)
    inside = not RunFolder(folder).is_run() and folder == RunFolder(folder.parent).model
    return str(folder.parent) if inside and RunFolder(folder.parent).is_run() else path


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
