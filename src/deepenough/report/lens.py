"""The lens view of a run: a page to explore and the drawing of its latest lens."""

from __future__ import annotations

from pathlib import Path

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.lens_page import lens_page
from deepenough.report.lens_table import draw_lens
from deepenough.report.source import Run


def write_lens(run: Run, folder: Path | str) -> list[Path]:
    """Write lens.html, lens.png and lens.pdf into `folder` and return their paths."""
    page, figure = lens_page(run), draw_lens(run)
    if page is None or figure is None:
        raise UserError(
            f"The run {run.name} has recorded no lens; make one with deepenough shortcut lens."
        )
    return page.save(Path(folder) / "lens") + style.save(figure, Path(folder) / "lens")
