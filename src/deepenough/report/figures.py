"""The tables of what can be drawn of one run, and the writing of all of it.

Each entry takes a `Run` and returns its picture, or None when the run has no such data. A new
kind of figure is one more file beside this one and one more line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.animation import Animation, animate_blocks
from deepenough.report.architecture import draw_derived
from deepenough.report.blocks import draw_blocks
from deepenough.report.lazy import LAZY_FIGURES
from deepenough.report.lens_page import Page, lens_page
from deepenough.report.lens_table import draw_lens
from deepenough.report.parity import draw_parity
from deepenough.report.ponder import draw_passes, draw_ponder_frontier
from deepenough.report.ponder_halting import draw_halting
from deepenough.report.shortcut_exit import draw_exit
from deepenough.report.shortcut_layers import draw_layers, draw_submodules
from deepenough.report.shortcut_tables import draw_cka, draw_r2
from deepenough.report.source import Run
from deepenough.report.training import draw_training

#: File name without its ending -> what draws it; saved as PNG and PDF.
FIGURES: dict[str, Callable[[Run], Figure | None]] = {
    "blocks": draw_blocks,
    "training": lambda run: draw_training([run]),
    "architecture": draw_derived,
    "r2": draw_r2,
    "cka": draw_cka,
    "layers": draw_layers,
    "submodules": draw_submodules,
    "early_exit": draw_exit,
    "lens": draw_lens,
    "ponder_frontier": draw_ponder_frontier,
    "passes": draw_passes,
    "halting": draw_halting,
    "parity": lambda run: draw_parity([run]),
    **{name: draw for name, (draw, _) in LAZY_FIGURES.items()},
}
#: The same for what moves; saved as GIF.
ANIMATIONS: dict[str, Callable[[Run], Animation | None]] = {"blocks": animate_blocks}
#: The same for what is explored in a browser; saved as HTML.
PAGES: dict[str, Callable[[Run], Page | None]] = {"lens": lens_page}


def write_figures(run: Run, folder: Path | str) -> list[Path]:
    """Draw everything the run has data for into `folder` and return the files."""
    written: list[Path] = []
    for name, draw in FIGURES.items():
        figure = draw(run)
        if figure is not None:
            written += style.save(figure, Path(folder) / name)
    for name, animate in ANIMATIONS.items():
        animation = animate(run)
        if animation is not None:
            written += animation.save(Path(folder) / name)
    for name, compose in PAGES.items():
        page = compose(run)
        if page is not None:
            written += page.save(Path(folder) / name)
    if not written:
        raise UserError(
            f"The run {run.name} has recorded nothing that is drawn (no loss, no pi, no pattern, "
            "no measurement of shortcuts, no lens, no look at tokens); name the folder of a "
            "search, a training or an evaluation."
        )
    return written


def write_comparison(runs: Sequence[Run], folder: Path | str) -> list[Path]:
    """Draw the training curves of several runs over one another into `folder`."""
    figure = draw_training(runs)
    if figure is None:
        raise UserError("None of the runs has a curve to compare; name folders of trainings.")
    return style.save(figure, Path(folder) / "training")
