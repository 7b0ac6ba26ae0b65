"""A report: one file that opens anywhere, without a network, or Markdown with pictures.

Charts are drawn by some hundred lines of plain JavaScript in `page_files/` and not by a library:
the page needs few kinds of panel, each with the same keyboard, theme and phone behaviour, and so
stays at some hundred kilobytes where a charting library alone would be megabytes of it.

Texts come from anyone's data: they reach the page as JSON or escaped, and scripts put them in as
text, never as markup; the page forbids the browser to load or send anything.
"""

import contextlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from deepenough import figure as fig
from deepenough.artifacts import write_text
from deepenough.errors import UserError
from deepenough.registry import METHODS
from deepenough.report.figures import FRONTIER, frontier_section, read_frontier, training_figure
from deepenough.runs import RunFolder

SCRIPTS = ("charts.js", "tables.js", "page.js")


@dataclass(frozen=True)
class Entry:
    """One run or one comparison in a report."""

    title: str
    section: fig.Section
    folder: str = ""

    @property
    def short_title(self) -> str:
        """The title without the method and the folders, for a link among others."""
        return self.title.partition(": ")[2].rpartition("/")[2]


@dataclass(frozen=True)
class Report:
    """What a page or a Markdown file shows: comparisons first, then runs."""

    title: str
    entries: Sequence[Entry]
    notes: Sequence[str]


def read_report(paths: Sequence[Path | str], title: str = "") -> Report:
    """Read runs and comparisons; a folder that has nothing to show yet is noted and left out."""
    comparisons: list[Entry] = []
    runs: list[Entry] = []
    notes: list[str] = []
    for path in paths:
        place = Path(path)
        if place.is_file():
            notes.append(f"{path} is a file, no run, and was left out: give the folder of a run.")
            continue
        if (place / FRONTIER).is_file():
            found = frontier_section(read_frontier(place))
            comparisons.append(Entry(f"Frontier: {place.resolve().name}", found))
            if not RunFolder(place).is_run():
                continue
        try:
            own = [fig.read_run(place), *_derived(place, paths)]
        except UserError as error:
            if not RunFolder(place).is_run():
                raise
            notes.append(f"{error}")
            continue
        for run in own:
            notes += run.notes
            section = run_section(run)
            if section is not None:
                name = "/".join(Path(run.path).resolve().parts[-2:])
                runs.append(Entry(f"{section.heading}: {name}", section, run.path))
    entries = [*comparisons, *runs]
    if not entries:
        nothing = "The runs have recorded nothing that is shown: train or measure first."
        raise UserError(" ".join(notes) or nothing)
    if not title:
        names = [entry.short_title for entry in entries]
        title = f"Report: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
    return Report(title, entries, notes)


def _derived(place: Path, paths: Sequence[Path | str]) -> list[fig.Run]:
    """Return the model that a search led to, a run inside of its own, unless it is named too."""
    derived = RunFolder(place).derived
    if derived.resolve() in {Path(path).resolve() for path in paths}:
        return []
    with contextlib.suppress(UserError):
        return [fig.read_run(derived)]
    return []


def run_section(run: fig.Run) -> fig.Section | None:
    """Return all that the methods, and the training curves, have to show of a run."""
    found = [make(run) for m in METHODS if (make := m.load("figures", "section")) is not None]
    sections = [section for section in found if section is not None]
    own = next((method for method in METHODS if method.name == run.method), None)
    command = own.load("figures", "training_command") if own is not None else None
    training = training_figure(run, command=command(run) if command is not None else "")
    if training is not None:
        heading = own.load("figures", "HEADING", own.name) if own is not None else "Training"
        sections.append(fig.Section(heading, figures=[training]))
    if not sections:
        return None
    return fig.Section(
        sections[0].heading,
        " ".join(section.about for section in sections if section.about),
        [finding for section in sections for finding in section.findings],
        [figure for section in sections for figure in section.figures],
    )


MAX_FRAMES = 150
"""Steps of a slider."""
MAX_POINTS = 300
"""Points of one line."""


def thinned(spec: fig.FigureSpec) -> fig.FigureSpec:
    """Return a figure small enough for a page; its caption says what was left out."""
    panels: list[fig.Panel] = []
    notes: dict[str, None] = {}
    for panel in spec.panels:
        if isinstance(panel, fig.Chart):
            lines = []
            for line in panel.lines:
                picks = fig.thin(range(len(line.x)), MAX_POINTS)
                if len(picks) < len(line.x):
                    notes[f"{len(picks)} of {len(line.x)} points of “{line.name}”"] = None
                kept: dict[str, Any] = {
                    name: [values[i] for i in picks]
                    for name in ("x", "y", "low", "high", "labels")
                    if len(values := getattr(line, name))
                }
                lines.append(replace(line, **kept))
            panels.append(replace(panel, lines=lines))
        elif isinstance(panel, fig.HeatMap):
            frames = fig.thin(panel.frames, MAX_FRAMES)
            if len(frames) < len(panel.frames):
                notes[f"{len(frames)} of {len(panel.frames)} recorded steps"] = None
            panels.append(replace(panel, frames=frames))
        else:
            panels.append(panel)
    shown = f" Shown: {', '.join(notes)}." if notes else ""
    return replace(spec, panels=panels, caption=spec.caption + shown)


def write_page(report: Report, file: Path) -> None:
    """Write the report as one HTML file."""
    _write(file, compose(report))


def _write(file: Path, content: str) -> None:
    with fig.writing(file.parent):
        write_text(file, _valid(content))


def _valid(content: str) -> str:
    """Return a text with a sign for what no page may hold: controls and halves of characters."""
    return re.sub("[^\t\n\r -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", content)


def compose(report: Report) -> str:
    """Return the page."""
    entries = report.entries
    places = {str(Path(e.folder).resolve()): n for n, e in enumerate(entries) if e.folder}
    data: list[dict[str, Any]] = []
    links, summary, sections = [], [], []
    for number, entry in enumerate(entries):
        title, text = html.escape(entry.title), html.escape(entry.short_title)
        links.append(f'<a href="#section-{number}" title="{title}">{text}</a>')
        if entry.section.findings:
            said = html.escape(" ".join(entry.section.findings))
            summary.append(f'<li><a href="#section-{number}">{title}</a>: {said}</li>')
        figures = []
        for figure in map(thinned, entry.section.figures):
            figures.append(figure_markup(figure, f'id="figure-{len(data)}"'))
            data.append(fig.as_json(figure))
        about = f"<p>{html.escape(entry.section.about)}</p>" if entry.section.about else ""
        heading = f'<h2 id="section-{number}">{title}</h2>'
        drawn = "\n".join(figures)
        sections.append(f'<section>{heading}{about}<div class="figures">{drawn}</div></section>')
    for point in (p for each in data for panel in each["panels"] for p in panel.get("points", ())):
        point["section"] = places.get(str(Path(point["folder"]).resolve()))
    # Within a script element only `</` and `<!--` would be read by the browser itself.
    spelt = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    page = Template(page_file("page.html")).substitute(
        title=html.escape(report.title),
        css=page_file("page.css"),
        script="\n".join(map(page_file, SCRIPTS)),
        figures=spelt,
        links="".join(links),
        notes=f'<div class="notes" role="note">{notes}</div>' if notes else "",
        summary="".join(summary) or "<li>Figures only.</li>",
        sections="\n".join(sections),
    )
    return _valid(page)


def figure_markup(figure: fig.FigureSpec, attribute: str) -> str:
    """Return the element that a script draws a figure into, with an attribute to find it by."""
    wide = ' class="wide"' if figure.wide else ""
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    return (
        f"<figure {attribute}{wide}><figcaption><h3>{title}</h3>"
        f'<p class="caption">{caption}</p></figcaption><div class="chart"></div>'
        f'<div class="tools"><button type="button" class="show-data" aria-expanded="false">Data'
        f'</button><code class="command">{html.escape(figure.command)}</code></div></figure>'
    )


def page_file(name: str) -> str:
    """Return a file of the page: a script, its style, or its frame."""
    folder = resources.files("deepenough.report") / "page_files"
    return (folder / name).read_text(encoding="utf-8")


def write_markdown(report: Report, file: Path) -> list[Path]:
    """Write the report as Markdown, with PNGs in a folder beside it, and return the files."""
    from deepenough.report.drawing import save  # takes a second, which a page need not wait for

    folder = file.with_name(f"{file.stem}-figures")
    written: list[Path] = []
    lines = [f"# {_escaped(report.title)}", ""]
    lines += [f"> {_escaped(note)}\n" for note in report.notes]
    for number, entry in enumerate(report.entries, start=1):
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
    _write(file, "\n".join(lines))
    return [file, *written]


def _escaped(text: str) -> str:
    """Return the text as Markdown shows it: no sign of its own, and no line break."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
