"""A report: one file that opens anywhere, without a network, and shows all that runs have recorded.

Charts are drawn by some hundred lines of plain JavaScript in `page_files/` and not by a library:
the page needs few kinds of chart, each with the same keyboard, theme and phone behaviour, and so
stays at some hundred kilobytes where a charting library alone would be megabytes of it.

Texts come from anyone's data: they reach the page as JSON or escaped, and scripts put them in as
text, never as markup; the page forbids the browser to load or send anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from deepenough.errors import UserError
from deepenough.report import style
from deepenough.report.frontier_file import FILE, Frontier, read_frontier
from deepenough.report.page_frontier import frontier_part
from deepenough.report.page_lazy import lazy_part
from deepenough.report.page_par import par_part, training_part
from deepenough.report.page_parts import Limits, Part, Section, Shown
from deepenough.report.page_ponder import parity_part, ponder_part
from deepenough.report.page_shortcut import shortcut_part
from deepenough.report.source import Run, read_run
from deepenough.runs import RunFolder

MAX_BYTES = 6_000_000
MAX_HALVINGS = 8
SCRIPTS = ("charts.js", "frontier.js", "tables.js", "page.js")

#: What can be shown of a run, in this order; None where it has no such data.
PARTS: tuple[Callable[[Run, str, Limits], Part | None], ...] = (
    shortcut_part,
    par_part,
    ponder_part,
    parity_part,
    lazy_part,
    training_part,
)


@dataclass(frozen=True)
class Sources:
    """What a report is about."""

    runs: Sequence[tuple[str, Run]]
    """Path as it was given, and the run."""
    frontiers: Sequence[Frontier]
    notes: Sequence[str]


def read_sources(paths: Sequence[Path | str]) -> Sources:
    """Runs and comparisons; a folder that has nothing to show yet is named and left out."""
    runs: list[tuple[str, Run]] = []
    frontiers: list[Frontier] = []
    notes: list[str] = []
    for path in paths:
        place = Path(path)
        if place.is_file() and place.name != FILE:
            notes.append(f"{path} is a file and no run, and was left out.")
            continue
        compared = place.name == FILE or (place / FILE).is_file()
        if compared:
            frontiers.append(read_frontier(place))
        if compared and not (place.is_dir() and RunFolder(place).is_run()):
            continue
        try:
            run = read_run(place)
        except UserError as error:
            if not RunFolder(place).is_run():
                raise
            notes.append(f"{error}")
            continue
        runs.append((str(path), run))
        notes += run.notes
        derived = _derived(place, paths)
        if derived is not None:
            runs.append((str(derived[0]), derived[1]))
            notes += derived[1].notes
    if not runs and not frontiers:
        raise UserError(" ".join(notes) or "Name at least one run folder or comparison.")
    return Sources(runs, frontiers, notes)


def _derived(place: Path, paths: Sequence[Path | str]) -> tuple[Path, Run] | None:
    """The model that a search led to, which is a run inside of its own, unless it is named."""
    derived = RunFolder(place).derived
    if derived.resolve() in {Path(path).resolve() for path in paths}:
        return None
    try:
        return derived, read_run(derived)
    except UserError:
        return None


def write_page(sources: Sources, path: Path | str, title: str = "") -> Path:
    """The report as one HTML file, thinned until it is small enough."""
    file = Path(path)
    content = compose(sources, title or title_of(sources))
    with style.writing(file.parent):
        file.write_text(content, encoding="utf-8")
    return file


def compose(sources: Sources, title: str, max_bytes: int = MAX_BYTES) -> str:
    """The page; where it would be too large, long data are halved and the page says so."""
    limits = Limits()
    for _ in range(MAX_HALVINGS):
        sections = make_sections(sources, limits)
        content = _render(sources, sections, title)
        if len(content.encode()) <= max_bytes:
            return content
        limits = limits.halved()
    raise UserError(
        f"The report is larger than {max_bytes / 1e6:g} MB however it is thinned: report fewer "
        "runs at once."
    )


def make_sections(sources: Sources, limits: Limits) -> list[Section]:
    """Comparisons first, then every run with all that it has data for."""
    found = [
        Section(f"Frontier: {frontier.name}", frontier_part(frontier, limits))
        for frontier in sources.frontiers
    ]
    for path, run in sources.runs:
        parts = [part for make in PARTS if (part := make(run, path, limits)) is not None]
        if parts:
            whole = _joined(parts)
            found.append(Section(f"{whole.method}: {_name(path)}", whole, path))
    if not found:
        raise UserError("The runs have recorded nothing that is shown: train or measure first.")
    return found


def _joined(parts: Sequence[Part]) -> Part:
    about = " ".join(part.about for part in parts if part.about)
    whole = Part(next(part.method for part in parts if part.method), about)
    for part in parts:
        whole.summary += part.summary
        whole.figures += part.figures
        whole.thinned += part.thinned
    return whole


def _name(path: str) -> str:
    parts = Path(path).resolve().parts
    return "/".join(parts[-2:])


def title_of(sources: Sources) -> str:
    names = [frontier.name for frontier in sources.frontiers]
    names += [Path(path).resolve().name for path, _ in sources.runs]
    shown = ", ".join(dict.fromkeys(names[:4]))
    return f"Report: {shown}{' and more' if len(names) > 4 else ''}"


def _render(sources: Sources, sections: Sequence[Section], title: str) -> str:
    figures = [figure for section in sections for figure in section.part.figures]
    places = {str(Path(s.folder).resolve()): n for n, s in enumerate(sections) if s.folder}
    data = [
        {"kind": each.kind, "title": each.title, "command": each.command, **each.data}
        for each in figures
    ]
    for point in (point for each in data for point in each.get("points", ())):
        point["section"] = places.get(str(Path(point["folder"]).resolve()))
    # Within a script element only `</` and `<!--` would be read by the browser itself.
    spelt = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    numbered = iter(range(len(figures)))
    thinned = [text for section in sections for text in section.thinned()]
    return Template(_file("page.html")).substitute(
        title=html.escape(title),
        css=_file("page.css"),
        script="\n".join(map(_file, SCRIPTS)),
        figures=spelt,
        links="".join(
            f'<a href="#section-{n}" title="{html.escape(s.title)}">{html.escape(s.short)}</a>'
            for n, s in enumerate(sections)
        ),
        notes=_notes(sources.notes),
        summary=_summary(sections),
        sections="\n".join(_section(n, s, numbered) for n, s in enumerate(sections)),
        footer=_footer(thinned),
    )


def _section(number: int, section: Section, numbered: Iterator[int]) -> str:
    figures = "\n".join(_figure(next(numbered), figure) for figure in section.part.figures)
    about = f"<p>{html.escape(section.part.about)}</p>" if section.part.about else ""
    heading = f'<h2 id="section-{number}">{html.escape(section.title)}</h2>'
    return f'<section>{heading}{about}<div class="figures">{figures}</div></section>'


def _figure(number: int, figure: Shown) -> str:
    wide = ' class="wide"' if figure.wide else ""
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    return (
        f'<figure id="figure-{number}"{wide}><figcaption><h3>{title}</h3>'
        f'<p class="caption">{caption}{_left_out(figure)}</p></figcaption><div class="chart"></div>'
        f'<div class="tools"><button type="button" class="show-data" aria-expanded="false">Data'
        f'</button><code class="command">{html.escape(figure.command)}</code></div></figure>'
    )


def _left_out(figure: Shown) -> str:
    said = ", ".join(figure.thinned())
    return html.escape(f" Shown: {said}.") if said else ""


def _summary(sections: Sequence[Section]) -> str:
    items = [
        f'<li><a href="#section-{number}">{html.escape(each.title)}</a>: '
        f"{html.escape(' '.join(each.part.summary))}</li>"
        for number, each in enumerate(sections)
        if each.part.summary
    ]
    return f'<ul class="summary">{"".join(items)}</ul>' if items else "<p>Figures only.</p>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<div class="notes" role="note">{items}</div>'


def _footer(thinned: Sequence[str]) -> str:
    said = "Made by deepenough."
    if thinned:
        said += " Thinned to keep the page small: " + "; ".join(thinned) + "."
    return html.escape(said)


def _file(name: str) -> str:
    folder = resources.files("deepenough.report") / "page_files"
    return (folder / name).read_text(encoding="utf-8")
