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
from deepenough.report.figures import (
    FRONTIER,
    frontier_section,
    overview_figure,
    read_frontier,
    training_figure,
)
from deepenough.runs import RunFolder

SCRIPTS = ("charts.js", "tables.js", "page.js")


@dataclass(frozen=True)
class Entry:
    """One run or one comparison in a report."""

    title: str
    section: fig.Section
    folder: str = ""
    made: str = ""
    """Version, date, processor, threads and seed, as far as the files tell."""

    @property
    def short_title(self) -> str:
        """The title without the method and the folders, for a link among others."""
        return self.title.partition(": ")[2].rpartition("/")[2]


@dataclass(frozen=True)
class Report:
    """What a page or a Markdown file shows: runs and comparisons, in the order of the questions."""

    title: str
    entries: Sequence[Entry]
    notes: Sequence[str]
    lead: fig.FigureSpec | None = None
    """Quality kept against compute, where anything was compared."""

    def answers(self) -> Iterator[tuple[str, list[tuple[int, Entry, list[fig.FigureSpec]]]]]:
        """Yield every question that has figures, with the entries that have some and these."""
        for question in fig.QUESTIONS:
            found = []
            for number, entry in enumerate(self.entries):
                own = entry.section.question
                figures = [f for f in entry.section.figures if (f.question or own) == question]
                if figures:
                    found.append((number, entry, figures))
            if found:
                yield question, found


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
        if (place / FRONTIER).is_file():
            compared.append(read_frontier(place))
            found, made = frontier_section(compared[-1]), _made(compared[-1])
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
            section = run_section(run)
            if section is not None:
                name = "/".join(Path(run.path).resolve().parts[-2:])
                runs.append(Entry(f"{section.heading}: {name}", section, run.path, _run_made(run)))
    order = fig.QUESTIONS.index
    entries = sorted([*comparisons, *runs], key=lambda entry: order(entry.section.question))
    if not entries:
        nothing = "The runs have recorded nothing that is shown: train or measure first."
        raise UserError(" ".join(notes) or nothing)
    if not title:
        names = [entry.short_title for entry in entries]
        names = list(dict.fromkeys(names))
        title = f"Report: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
    return Report(title, entries, notes, overview_figure(compared))


def _made(found: Comparison) -> str:
    """Return when and on what a comparison was measured."""
    about, how = found.provenance, found.protocol
    threads = how.get("threads")
    return ", ".join(
        str(part)
        for part in (
            _version(about),
            about.get("date"),
            how.get("processor"),
            None if threads is None else f"{threads} thread{'s' * (threads != 1)}",
            None if how.get("seed") is None else f"seed {how['seed']}",
        )
        if part
    )


def _run_made(run: fig.Run) -> str:
    """Return when and on what a run was made, as far as its files tell."""
    about, train = run.config.get("provenance"), run.config.get("train")
    about, train = (each if isinstance(each, dict) else {} for each in (about, train))
    moment = max((record.time for record in run.records), default=0.0)
    seed = train.get("seed")
    found = [_version(about), time.strftime("%Y-%m-%d", time.localtime(moment)) if moment else ""]
    found += [str(about.get("processor") or ""), "" if seed is None else f"seed {seed}"]
    return ", ".join(filter(None, found))


def _version(about: Mapping[str, Any]) -> str:
    versions = about.get("versions")
    version = versions.get("deepenough") if isinstance(versions, Mapping) else None
    return f"deepenough {version}" if version else ""


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
        training = replace(training, question=fig.TRAINED)
        sections.append(fig.Section(heading, figures=[training]))
    if not sections:
        return None
    return fig.Section(
        sections[0].heading,
        " ".join(section.about for section in sections if section.about),
        [finding for section in sections for finding in section.findings],
        [
            replace(figure, question=figure.question or section.question)
            for section in sections
            for figure in section.figures
        ],
        sections[0].question,
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
    """Return the page: verdicts and one chart, then the figures by the question they answer."""
    data: list[dict[str, Any]] = []

    def add(figure: fig.FigureSpec) -> str:
        data.append(fig.as_json(thinned(figure)))
        return _figure(len(data) - 1, thinned(figure))

    first = "" if report.lead is None else f'<div class="figures">{add(report.lead)}</div>'
    places: dict[str, str] = {}  # of a folder: where its run first stands on the page
    anchors: dict[int, str] = {}
    links, sections = [], []
    for place, (question, answers) in enumerate(report.answers()):
        links.append(f'<a href="#question-{place}">{html.escape(question)}</a>')
        parts = []
        for number, entry, figures in answers:
            anchor = f"run-{number}-{place}"
            about = ""
            if anchors.setdefault(number, anchor) == anchor and entry.section.about:
                about = f"<p>{html.escape(entry.section.about)}</p>"
            if entry.folder:
                places.setdefault(str(Path(entry.folder).resolve()), anchor)
            drawn = "\n".join(map(add, figures))
            heading = f'<h3 id="{anchor}">{html.escape(entry.title)}</h3>'
            parts.append(f'{heading}{about}<div class="figures">{drawn}</div>')
        heading = f'<h2 id="question-{place}">{html.escape(question)}</h2>'
        sections.append(f"<section>{heading}{''.join(parts)}</section>")
    for point in (p for each in data for panel in each["panels"] for p in panel.get("points", ())):
        point["section"] = places.get(str(Path(point["folder"]).resolve()))
    # Within a script element only `</` and `<!--` would be read by the browser itself.
    spelt = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    page = Template(_file("page.html")).substitute(
        title=html.escape(report.title),
        css=_file("page.css"),
        script="\n".join(map(_file, SCRIPTS)),
        figures=spelt,
        links="".join(links),
        notes=f'<div class="notes" role="note">{notes}</div>' if notes else "",
        summary="".join(_verdicts(report.entries, anchors)) or "<li>Figures only.</li>",
        first=first,
        sections="\n".join(sections),
        made="".join(f"<li>{html.escape(line)}</li>" for line in _origins(report)),
    )
    return _valid(page)


def _verdicts(entries: Sequence[Entry], anchors: Mapping[int, str]) -> Iterator[str]:
    """Yield what every entry found, a line a sentence, with the command to go on."""
    several = sum(bool(entry.section.findings) for entry in entries) > 1
    for number, entry in enumerate(entries):
        for place, finding in enumerate(entry.section.findings):
            said = html.escape(finding)
            if several and not place:
                name = html.escape(entry.title)
                link = anchors.get(number)
                said = f'<a href="#{link}">{name}</a>: {said}' if link else f"{name}: {said}"
            command = getattr(finding, "command", "")
            # Word by word, so that a line ends between two of them.
            words = "".join(f"<span>{html.escape(word)} </span>" for word in command.split())
            yield f"<li>{said}{f' <code class=next>{words}</code>' if words else ''}</li>"


def _origins(report: Report) -> list[str]:
    """Return what the figures were made by and on, a line for all entries that share it."""
    found: dict[str, list[str]] = {}
    for entry in report.entries:
        if entry.made:
            found.setdefault(entry.made, []).append(entry.title)
    lines = [f"{', '.join(names)}: {made}." for made, names in found.items()]
    return [f"This page: {_version(provenance())}, {time.strftime('%Y-%m-%d')}.", *lines]


def _figure(number: int, figure: fig.FigureSpec) -> str:
    wide = ' class="wide"' if figure.wide else ""
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    return (
        f'<figure id="figure-{number}"{wide}><figcaption><h4>{title}</h4>'
        f'<p class="caption">{caption}</p></figcaption><div class="chart"></div>'
        f'<div class="tools"><button type="button" class="show-data" aria-expanded="false">Data'
        '</button><button type="button" class="save-svg">SVG</button>'
        '<button type="button" class="save-png">PNG</button>'
        f'<code class="command">{html.escape(figure.command)}</code></div></figure>'
    )


def _file(name: str) -> str:
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
    for question, answers in report.answers():
        lines += [f"## {question}", ""]
        for number, entry, figures in answers:
            lines += [f"### {_escaped(entry.title)}", "", _escaped(entry.section.about), ""]
            add(number + 1, figures)
    lines += [*(f"- {_escaped(line)}" for line in _origins(report)), ""]
    _write(file, "\n".join(lines))
    return [file, *written]


def _escaped(text: str) -> str:
    """Return the text as Markdown shows it: no sign of its own, and no line break."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))
