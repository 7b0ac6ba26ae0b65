"""A report: one file that opens anywhere, without a network, or Markdown with pictures.

Charts are drawn by some hundred lines of plain JavaScript in `page_files/` and not by a library:
the page needs few kinds of panel, each with the same keyboard, theme and phone behaviour, and so
stays at some hundred kilobytes where a charting library alone would be megabytes of it.

Texts come from anyone's data: they reach the page as JSON or escaped, and scripts put them in as
text, never as markup; the page forbids the browser to load or send anything.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeVar
from urllib.parse import quote

from deepenough.errors import UserError
from deepenough.figure import Chart, FigureSpec, HeatMap, Panel, Run, Section, TokenText, read_run
from deepenough.registry import METHODS
from deepenough.report.figures import (
    FRONTIER_FILE,
    Frontier,
    frontier_section,
    read_frontier,
    training_figure,
)
from deepenough.runs import RunFolder

MAX_BYTES = 6_000_000
MAX_HALVINGS = 8
SCRIPTS = ("charts.js", "tables.js", "page.js")

T = TypeVar("T")


# -- what is reported -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The runs and comparisons of a report."""

    runs: Sequence[Run]
    frontiers: Sequence[Frontier]
    notes: Sequence[str]


@dataclass(frozen=True)
class Entry:
    """One run or one comparison in a report."""

    title: str
    section: Section
    folder: str = ""

    @property
    def short_title(self) -> str:
        """The title without the method and the folders, for a link among others."""
        return self.title.partition(": ")[2].rpartition("/")[2] or self.title


def read_sources(paths: Sequence[Path | str]) -> Sources:
    """Read runs and comparisons; a folder that has nothing to show yet is noted and left out."""
    runs: list[Run] = []
    frontiers: list[Frontier] = []
    notes: list[str] = []
    for path in paths:
        place = Path(path)
        if place.is_file() and place.name != FRONTIER_FILE:
            notes.append(f"{path} is a file and no run, and was left out.")
            continue
        compared = place.name == FRONTIER_FILE or (place / FRONTIER_FILE).is_file()
        if compared:
            frontiers.append(read_frontier(place))
        if compared and not (place.is_dir() and RunFolder(place).is_run()):
            continue
        try:
            run = replace(read_run(place), path=str(path))
        except UserError as error:
            if not RunFolder(place).is_run():
                raise
            notes.append(f"{error}")
            continue
        runs += [run, *_derived(place, paths)]
    if not runs and not frontiers:
        raise UserError(" ".join(notes) or "Name at least one run folder or comparison.")
    return Sources(runs, frontiers, [*notes, *(note for run in runs for note in run.notes)])


def _derived(place: Path, paths: Sequence[Path | str]) -> Iterator[Run]:
    """Yield the model that a search led to, a run inside of its own, unless it is named too."""
    derived = RunFolder(place).derived
    if derived.resolve() in {Path(path).resolve() for path in paths}:
        return
    try:
        yield read_run(derived)
    except UserError:
        return


def run_section(run: Run) -> Section | None:
    """Return all that the methods, and the training curves, have to show of a run."""
    found = [make(run) for m in METHODS if (make := m.load("figures", "section")) is not None]
    sections = [section for section in found if section is not None]
    own = next((method for method in METHODS if method.name == run.method), None)
    command = own.load("figures", "training_command") if own is not None else None
    training = training_figure(run, command=command(run) if command is not None else "")
    if training is not None:
        heading = own.load("figures", "HEADING", own.name) if own is not None else "Training"
        sections.append(Section(heading, figures=[training]))
    if not sections:
        return None
    return Section(
        sections[0].heading,
        " ".join(section.about for section in sections if section.about),
        [finding for section in sections for finding in section.findings],
        [figure for section in sections for figure in section.figures],
    )


def make_entries(sources: Sources) -> list[Entry]:
    """Return comparisons first, then every run with all that it has data for."""
    found = [
        Entry(f"Frontier: {frontier.name}", frontier_section(frontier))
        for frontier in sources.frontiers
    ]
    for run in sources.runs:
        section = run_section(run)
        if section is not None:
            name = "/".join(Path(run.path).resolve().parts[-2:])
            found.append(Entry(f"{section.heading}: {name}", section, run.path))
    if not found:
        raise UserError("The runs have recorded nothing that is shown: train or measure first.")
    return found


def title_of(sources: Sources) -> str:
    """Return a title that names the first runs and comparisons."""
    names = [frontier.name for frontier in sources.frontiers]
    names += [run.name for run in sources.runs]
    shown = ", ".join(dict.fromkeys(names[:4]))
    return f"Report: {shown}{' and more' if len(names) > 4 else ''}"


# -- thinning ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How much of long data is shown; halved until a page is small enough."""

    frames: int = 150
    """Steps of a slider."""
    points: int = 300
    """Points of one line."""
    tokens: int = 300
    """Tokens of one text."""

    def halved(self) -> Limits:
        """Return the limits of the next smaller page."""
        return Limits(max(2, self.frames // 2), max(2, self.points // 2), max(1, self.tokens // 2))


def thin(items: Sequence[T], limit: int) -> list[T]:
    """Return at most so many items, evenly, the first and the last always among them."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def thinned(spec: FigureSpec, limits: Limits) -> tuple[FigureSpec, list[str]]:
    """Return a figure within the limits, and what was left out of it."""
    panels: list[Panel] = []
    notes: dict[str, None] = {}
    for panel in spec.panels:
        if isinstance(panel, Chart):
            lines = []
            for line in panel.lines:
                picks = thin(range(len(line.x)), limits.points)
                if len(picks) < len(line.x):
                    notes[f"{len(picks)} of {len(line.x)} points of “{line.name}”"] = None
                kept: dict[str, Any] = {
                    name: [values[i] for i in picks]
                    for name in ("x", "y", "low", "high", "labels")
                    if len(values := getattr(line, name))
                }
                lines.append(replace(line, **kept))
            panels.append(replace(panel, lines=lines))
        elif isinstance(panel, HeatMap):
            frames = thin(panel.frames, limits.frames)
            if len(frames) < len(panel.frames):
                notes[f"{len(frames)} of {len(panel.frames)} recorded steps"] = None
            panels.append(replace(panel, frames=frames))
        elif isinstance(panel, TokenText):
            if len(panel.tokens) > limits.tokens:
                notes[f"the last {limits.tokens} of {len(panel.tokens)} tokens"] = None
            panels.append(panel.last_tokens(limits.tokens))
        else:
            panels.append(panel)
    return replace(spec, panels=panels), list(notes)


# -- HTML -------------------------------------------------------------------------------------


def write_page(sources: Sources, path: Path | str, title: str = "") -> Path:
    """Write the report as one HTML file and return its path."""
    file = Path(path)
    _write(file, compose(sources, title or title_of(sources)))
    return file


def _write(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write the report {file} ({error.strerror or error}); choose another file with "
            "--out."
        ) from error


def compose(sources: Sources, title: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the page; where it would be too large, long data are halved and the page says so."""
    entries = make_entries(sources)
    limits = Limits()
    for _ in range(MAX_HALVINGS):
        content = _render(sources.notes, entries, title, limits)
        if len(content.encode()) <= max_bytes:
            return content
        limits = limits.halved()
    raise UserError(
        f"The report is larger than {max_bytes / 1e6:g} MB however it is thinned: report fewer "
        "runs at once."
    )


def as_json(value: Any, digits: int = 5) -> Any:
    """Return a panel as JSON has it: numbers rounded, and null for what is no number."""
    if dataclasses.is_dataclass(value):
        content = {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        kind = getattr(value, "kind", None)
        return content | {"kind": kind} if kind else content
    if isinstance(value, list | tuple):
        return [as_json(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def _render(notes: Sequence[str], entries: Sequence[Entry], title: str, limits: Limits) -> str:
    places = {str(Path(e.folder).resolve()): n for n, e in enumerate(entries) if e.folder}
    data: list[dict[str, Any]] = []
    left_out: list[str] = []
    sections = []
    for number, entry in enumerate(entries):
        figures = []
        for figure in entry.section.figures:
            spec, missing = thinned(figure, limits)
            figures.append(_figure(len(data), spec, missing))
            data.append(as_json(spec))
            left_out += [f"{entry.title}: {text} in “{spec.title}”" for text in missing]
        about = f"<p>{html.escape(entry.section.about)}</p>" if entry.section.about else ""
        heading = f'<h2 id="section-{number}">{html.escape(entry.title)}</h2>'
        drawn = "\n".join(figures)
        sections.append(f'<section>{heading}{about}<div class="figures">{drawn}</div></section>')
    for point in (p for each in data for panel in each["panels"] for p in panel.get("points", ())):
        point["section"] = places.get(str(Path(point["folder"]).resolve()))
    # Within a script element only `</` and `<!--` would be read by the browser itself.
    spelt = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = Template(_file("page.html")).substitute(
        title=html.escape(title),
        css=_file("page.css"),
        script="\n".join(map(_file, SCRIPTS)),
        figures=spelt,
        links="".join(_link(number, entry) for number, entry in enumerate(entries)),
        notes=_notes(notes),
        summary=_summary(entries),
        sections="\n".join(sections),
        footer=_footer(left_out),
    )
    # A prompt may hold half a character, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def _figure(number: int, figure: FigureSpec, missing: Sequence[str]) -> str:
    wide = ' class="wide"' if figure.wide else ""
    shown = f" Shown: {', '.join(missing)}." if missing else ""
    title, caption = html.escape(figure.title), html.escape(figure.caption + shown)
    return (
        f'<figure id="figure-{number}"{wide}><figcaption><h3>{title}</h3>'
        f'<p class="caption">{caption}</p></figcaption><div class="chart"></div>'
        f'<div class="tools"><button type="button" class="show-data" aria-expanded="false">Data'
        f'</button><code class="command">{html.escape(figure.command)}</code></div></figure>'
    )


def _link(number: int, entry: Entry) -> str:
    title, text = html.escape(entry.title), html.escape(entry.short_title)
    return f'<a href="#section-{number}" title="{title}">{text}</a>'


def _summary(entries: Sequence[Entry]) -> str:
    items = [
        f'<li><a href="#section-{number}">{html.escape(entry.title)}</a>: '
        f"{html.escape(' '.join(entry.section.findings))}</li>"
        for number, entry in enumerate(entries)
        if entry.section.findings
    ]
    return f'<ul class="summary">{"".join(items)}</ul>' if items else "<p>Figures only.</p>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<div class="notes" role="note">{items}</div>'


def _footer(left_out: Sequence[str]) -> str:
    said = "Made by deepenough."
    if left_out:
        said += " Left out to keep the page small: " + "; ".join(left_out) + "."
    return html.escape(said)


def _file(name: str) -> str:
    folder = resources.files("deepenough.report") / "page_files"
    return (folder / name).read_text(encoding="utf-8")


# -- Markdown ---------------------------------------------------------------------------------


def write_markdown(sources: Sources, path: Path | str, title: str = "") -> list[Path]:
    """Write the report as Markdown, with PNGs in a folder beside it, and return the files."""
    from deepenough.report.drawing import save  # takes a second, which a page need not wait for

    file = Path(path)
    folder = file.with_name(f"{file.stem}-figures")
    written: list[Path] = []
    lines = [f"# {_escaped(title or title_of(sources))}", ""]
    lines += [f"> {_escaped(note)}\n" for note in sources.notes]
    for number, entry in enumerate(make_entries(sources), start=1):
        section = entry.section
        lines += [f"## {_escaped(entry.title)}", ""]
        lines += [_escaped(section.about), ""] if section.about else []
        lines += [*(f"- {_escaped(text)}" for text in section.findings), ""]
        for figure in section.figures:
            pictures = save(replace(figure, name=f"{number}-{figure.name}"), folder, ("png",))
            written += pictures
            for picture in pictures:
                place = quote(f"{folder.name}/{picture.name}")
                lines += [f"![{_escaped(figure.title)}]({place})", ""]
            lines += [_escaped(figure.caption), ""]
        commands = dict.fromkeys(" ".join(f.command.split()) for f in section.figures if f.command)
        lines += ["Made by", "", *(f"    {command}" for command in commands), ""]
    _write(file, "\n".join(lines).encode("utf-8", "replace").decode("utf-8"))
    return [file, *written]


def _escaped(text: str) -> str:
    """Return the text as Markdown shows it: no sign of its own, and no line break."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
