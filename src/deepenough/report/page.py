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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from deepenough import figure as fig
from deepenough.artifacts import write_text
from deepenough.config import provenance
from deepenough.errors import UserError
from deepenough.measurement import Comparison
from deepenough.registry import METHODS
from deepenough.report import figures
from deepenough.runs import SHIPPED, RunFolder

SCRIPTS = ("charts.js", "tables.js", "page.js")


@dataclass(frozen=True)
class Entry:
    """One run or one comparison in a report."""

    title: str
    section: fig.Section
    folder: str = ""
    made: str = ""
    """Version, date, processor, threads and seed, as far as the files tell."""


@dataclass(frozen=True)
class Report:
    """What a page or a Markdown file shows: runs and comparisons, in the order of the questions."""

    title: str
    entries: Sequence[Entry]
    notes: Sequence[str]
    lead: fig.FigureSpec | None = None
    """Quality kept against compute, where anything was compared."""

    def answers(self) -> Iterator[tuple[str, list[tuple[int, Entry]]]]:
        """Yield every question that there are entries for, with these and their numbers."""
        numbered = enumerate(self.entries)
        for question, entries in groupby(numbered, key=lambda pair: pair[1].section.question):
            yield question, list(entries)


def read_report(paths: Sequence[Path | str], title: str = "") -> Report:
    """Read runs and comparisons; a folder that has nothing to show yet is noted and left out."""
    comparisons: list[Entry] = []
    compared: list[Comparison] = []
    runs: list[Entry] = []
    notes: list[str] = []
    for path in paths:
        place = Path(path)
        if place.is_file():
            notes.append(f"{path} is a file, no run, and was left out: give the folder of a run.")
            continue
        if (place / figures.FRONTIER).is_file():
            compared.append(figures.read_frontier(place))
            found = figures.frontier_section(compared[-1])
            made = _made(compared[-1].provenance, how=compared[-1].protocol)
            comparisons.append(Entry(f"{found.heading}: {place.resolve().name}", found, made=made))
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
            ships = str(path) in SHIPPED and not place.exists()
            name = str(path) if ships else "/".join(Path(run.path).resolve().parts[-2:])
            date = time.strftime("%Y-%m-%d", time.localtime(run.records[-1].time))
            made = _made(run.config.get("provenance"), date, run.config.get("train"))
            for section in run_sections(run):
                runs.append(Entry(f"{section.heading}: {name}", section, run.path, made))
    order = fig.QUESTIONS.index
    entries = sorted([*comparisons, *runs], key=lambda entry: order(entry.section.question))
    if not entries:
        nothing = "The runs have recorded nothing that is shown: train or measure first."
        raise UserError(" ".join(notes) or nothing)
    if not title:
        names = list(dict.fromkeys(re.split("[:/] ?", entry.title)[-1] for entry in entries))
        title = f"Report: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
    return Report(title, entries, notes, figures.overview_figure(compared))


def _made(about: Any, date: Any = "", how: Any = None) -> str:
    """Return by what, when and on what something was made, as far as its files tell."""
    about, how = (each if isinstance(each, Mapping) else {} for each in (about, how))
    versions, threads = about.get("versions"), how.get("threads")
    version = versions.get("deepenough") if isinstance(versions, Mapping) else None
    found = [f"deepenough {version}" if version else "", date or about.get("date")]
    found += [how.get("processor") or about.get("processor")]
    found += ["" if threads is None else f"{threads} thread{'s' * (threads != 1)}"]
    found += ["" if how.get("seed") is None else f"seed {how['seed']}"]
    return ", ".join(str(part) for part in found if part)


def _derived(place: Path, paths: Sequence[Path | str]) -> list[fig.Run]:
    """Return the model that a search led to, a run inside of its own, unless it is named too."""
    derived = RunFolder(place).derived
    if derived.resolve() in {Path(path).resolve() for path in paths}:
        return []
    with contextlib.suppress(UserError):
        return [fig.read_run(derived)]
    return []


def run_sections(run: fig.Run) -> list[fig.Section]:
    """Return all that the methods, and the training curves, have to show of a run."""
    found = [make(run) for m in METHODS if (make := m.load("figures", "section")) is not None]
    sections = [section for section in found if section is not None]
    own = next((method for method in METHODS if method.name == run.method), None)
    command = own.load("figures", "training_command") if own is not None else None
    training = figures.training_figure(run, command=command(run) if command is not None else "")
    if training is not None:
        heading = own.load("figures", "HEADING", own.name) if own is not None else "Training"
        sections.append(fig.Section(heading, figures=[training], question=fig.TRAINED))
    return sections


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
    """Return the page: verdicts and one chart, then the figures by the question they answer."""
    data: list[dict[str, Any]] = []

    def add(figure: fig.FigureSpec) -> str:
        data.append(fig.as_json(thinned(figure)))
        return figure_markup(thinned(figure), f'id="figure-{len(data) - 1}"')

    first = "" if report.lead is None else f'<div class="figures">{add(report.lead)}</div>'
    places: dict[str, int] = {}  # of a folder: the number of its first entry
    links, sections = [], []
    for place, (question, entries) in enumerate(report.answers()):
        links.append(f'<a href="#question-{place}">{html.escape(question)}</a>')
        sections.append(f'<h2 id="question-{place}">{html.escape(question)}</h2>')
        for number, entry in entries:
            if entry.folder:
                places.setdefault(str(Path(entry.folder).resolve()), number)
            about = f"<p>{html.escape(entry.section.about)}</p>" if entry.section.about else ""
            drawn = "\n".join(map(add, entry.section.figures))
            heading = f'<h3 id="run-{number}">{html.escape(entry.title)}</h3>'
            sections.append(
                f'<section>{heading}{about}<div class="figures">{drawn}</div></section>'
            )
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
        summary="".join(_verdicts(report.entries)) or "<li>Figures only.</li>",
        first=first,
        sections="\n".join(sections),
        made="".join(f"<li>{html.escape(line)}</li>" for line in _origins(report)),
    )
    return _valid(page)


def _verdicts(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield what every entry found, a line a sentence, with the command to go on."""
    several = sum(bool(entry.section.findings) for entry in entries) > 1
    for number, entry in enumerate(entries):
        link = f'<a href="#run-{number}">{html.escape(entry.title)}</a>: ' if several else ""
        for finding in entry.section.findings:
            # Word by word, so that a line ends between two of them.
            command = getattr(finding, "command", "").split()
            words = "".join(f"<span>{html.escape(word)} </span>" for word in command)
            code = f"<code class=next>{words}</code>" if words else ""
            yield f"<li>{link}{html.escape(finding)}{code}</li>"
            link = ""


def _origins(report: Report) -> list[str]:
    """Return what the figures were made by and on, a line for each entry."""
    lines = dict.fromkeys(f"{entry.title}: {entry.made}." for entry in report.entries if entry.made)
    return [f"This page: {_made(provenance(), time.strftime('%Y-%m-%d'))}.", *lines]


def figure_markup(figure: fig.FigureSpec, attribute: str) -> str:
    """Return the element that a script draws a figure into, with an attribute to find it by."""
    wide = ' class="wide"' if figure.wide else ""
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    return (
        f"<figure {attribute}{wide}><figcaption><h4>{title}</h4>"
        f'<p class="caption">{caption}</p></figcaption><div class="chart"></div>'
        f'<div class="tools"><button type="button" class="show-data" aria-expanded="false">Data'
        '</button><button type="button" class="save-svg">SVG</button>'
        '<button type="button" class="save-png">PNG</button>'
        f'<code class="command">{html.escape(figure.command)}</code></div></figure>'
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
    said = [finding for entry in report.entries for finding in entry.section.findings]
    lines += [*(f"- {_escaped(finding)}" for finding in said), ""]

    def add(number: int, figures: Sequence[fig.FigureSpec]) -> None:
        for figure in figures:
            pictures = save(replace(figure, name=f"{number}-{figure.name}"), folder, ("png",))
            written.extend(pictures)
            for picture in pictures:
                place = quote(f"{folder.name}/{picture.name}")
                lines.extend([f"![{_escaped(figure.title)}]({place})", ""])
            lines.extend([_escaped(figure.caption), ""])
        commands = dict.fromkeys(" ".join(f.command.split()) for f in figures if f.command)
        lines.extend(["Made by", "", *(f"    {command}" for command in commands), ""])

    if report.lead is not None:
        add(0, [report.lead])
    for question, entries in report.answers():
        lines += [f"## {question}", ""]
        for number, entry in entries:
            lines += [f"### {_escaped(entry.title)}", "", _escaped(entry.section.about), ""]
            add(number + 1, entry.section.figures)
    lines += [*(f"- {_escaped(line)}" for line in _origins(report)), ""]
    _write(file, "\n".join(lines))
    return [file, *written]


def _escaped(text: str) -> str:
    """Return the text as Markdown shows it: no sign of its own, and no line break."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
