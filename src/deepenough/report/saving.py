"""All figures of a run or a comparison, drawn into files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepenough.errors import UserError
from deepenough.figure import FigureSpec, Run
from deepenough.registry import METHODS

if TYPE_CHECKING:
    from deepenough.report.figures import Frontier


def run_figures(run: Run) -> list[FigureSpec]:
    """Return every figure that the run has data for, training curves last."""
    from deepenough.report.figures import training_figure

    builders = [build for method in METHODS for build in method.load("figures", "FIGURES", ())]
    found = [build(run) for build in (*builders, training_figure)]
    return [figure for figure in found if figure is not None]


def write_figures(run: Run, folder: Path | str) -> list[Path]:
    """Draw everything the run has data for into `folder` and return the files."""
    figures = run_figures(run)
    if not figures:
        raise UserError(
            f"The run {run.name} has recorded nothing that is drawn; name the folder of a search, "
            "a training or an evaluation."
        )
    return save_figures(figures, folder)


def write_comparison(runs: Sequence[Run], folder: Path | str) -> list[Path]:
    """Draw the training curves of several runs over one another into `folder`."""
    from deepenough.report.figures import training_figure

    figure = training_figure(*runs)
    if figure is None:
        raise UserError("None of the runs has a curve to compare; name folders of trainings.")
    return save_figures([figure], folder)


def write_frontier_figures(frontier: Frontier, folder: Path | str) -> list[Path]:
    """Draw quality against each cost of a comparison into `folder`."""
    from deepenough.report.figures import frontier_figure

    return save_figures([frontier_figure(frontier)], folder)


def save_figures(figures: Sequence[FigureSpec], folder: Path | str) -> list[Path]:
    """Write PNG, PDF and SVG of every figure, and its data as NAME.data.json; return the files."""
    from deepenough.report import drawing, style
    from deepenough.report.page import as_json

    written: list[Path] = []
    for figure in figures:
        written += drawing.save(figure, folder)
        data = Path(folder) / f"{figure.name}.data.json"
        with style.writing(data.parent):
            data.write_text(json.dumps(as_json(figure)) + "\n")
        written.append(data)
    return written
