"""A report for papers and pull requests: Markdown beside its pictures as PNG.

The pictures are those of `deepenough plot`; the sentences are those of the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.figures import write_figures
from deepenough.report.frontier_file import write_frontier_figures
from deepenough.report.page import Sources, make_sections, title_of
from deepenough.report.page_parts import Limits, Section


def write_markdown(sources: Sources, path: Path | str, title: str = "") -> list[Path]:
    """`<path>` and a folder of pictures beside it; returns the files."""
    file = Path(path)
    folder = file.with_name(f"{file.stem}-figures")
    written: list[Path] = []
    lines = [f"# {_escaped(title or title_of(sources))}", ""]
    lines += [f"> {_escaped(note)}\n" for note in sources.notes]
    for number, (source, draw) in enumerate(_each(sources), start=1):
        pictures = _pictures(draw, folder, number)
        for section in make_sections(source, Limits(pictures=0)):
            lines += _section(section, [f"{folder.name}/{picture.name}" for picture in pictures])
        written += pictures
    with style.writing(file.parent):
        file.write_text("\n".join(lines), encoding="utf-8")
    return [file, *written]


def _each(sources: Sources) -> Iterator[tuple[Sources, Callable[[Path], list[Path]]]]:
    """Every comparison and every run that has something to show, with what draws it."""
    for frontier in sources.frontiers:
        yield Sources((), (frontier,), ()), partial(write_frontier_figures, frontier)
    for path, run in sources.runs:
        alone = Sources(((path, run),), (), ())
        try:
            make_sections(alone, Limits(pictures=0))
        except UserError:
            continue
        yield alone, partial(write_figures, run)


def _section(section: Section, pictures: Sequence[str]) -> list[str]:
    part = section.part
    lines = [f"## {_escaped(section.title)}", ""]
    if part.about:
        lines += [_escaped(part.about), ""]
    if part.summary:
        lines += [*(f"- {_escaped(text)}" for text in part.summary), ""]
    for picture in pictures:
        lines += [f"![{_escaped(Path(picture).stem)}]({quote(picture)})", ""]
    commands = dict.fromkeys(" ".join(figure.command.split()) for figure in part.figures)
    return [*lines, "Made by", "", *(f"    {command}" for command in commands), ""]


def _pictures(draw: Callable[[Path], list[Path]], folder: Path, number: int) -> list[Path]:
    """The PNGs of one source, under names that tell whose they are."""
    drawn, found = folder / "drawing", []
    try:
        written = draw(drawn)
    except UserError:  # nothing that is drawn; the sentences remain
        written = []
    for picture in written:
        if picture.suffix == ".png":
            found.append(picture.replace(folder / f"{number}-{picture.name}"))
    shutil.rmtree(drawn, ignore_errors=True)
    return found


def _escaped(text: str) -> str:
    """As Markdown shows it: no sign of its own, and no line break."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
