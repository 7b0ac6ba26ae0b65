"""Figures as plain data, and the reading of a run's records that they are built from.

Every figure is built once, as a `FigureSpec`: texts, and panels that hold numbers. Two renderers
draw it: `deepenough.report.drawing` with matplotlib and the scripts of a report's page. Neither
torch nor matplotlib is imported here, and no figure needs a model.

Colours are places in a palette of seven that both renderers share and that people with any common
colour blindness tell apart; each place has a marker of its own as well.

Values of records are checked here, so that builders may trust them: a number that is missing, not a
number or infinite is treated as absent.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from deepenough.errors import UserError
from deepenough.runs import Record, RunFolder, read_config, read_records

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = range(7)
"""Places in the palette."""
GREY = -1
"""The colour of what stands behind the others."""

EARLY, BLOCKS = "How early does it know?", "Which blocks does it need?"
LONG, CHANGES = "How long does it think?", "What still changes?"
COST, TRAINED = "What does it cost?", "How was it trained?"
QUESTIONS = (EARLY, BLOCKS, LONG, CHANGES, COST, TRAINED)
"""What the figures of a report answer, in its order."""

Numbers: TypeAlias = Sequence[float]
MaybeNumbers: TypeAlias = Sequence[float | None]

# -- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One axis of a chart, or the scale of a heat map's colours."""

    label: str = ""
    scale: str = "linear"
    """`linear`, `log`, `root` (square roots are even), or `angle` (of a squared cosine: a value
    stands as far from 1 as the sine of its angle, so that values near 1 are told apart)."""
    percent: bool = False
    """Values are shares of 1, shown as percentages."""
    whole: bool = False
    """Ticks stand at whole numbers only."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line through points, or the points alone."""

    name: str
    x: Numbers
    y: Numbers
    color: int | None = None
    """Place in the palette; by default the place of the name among the names of the figure."""
    style: str = "solid"
    """`solid`, `dashed`, `dotted`, or `none` for points that are not joined."""
    marker: bool = True
    low: Numbers = ()
    """With `high`, a band around the line."""
    high: Numbers = ()
    labels: Sequence[str] = ()
    """A short text beside each point."""


@dataclass(frozen=True)
class Bars:
    """One bar a category."""

    name: str
    values: MaybeNumbers
    color: int | None = None
    texts: Sequence[str] = ()
    """Written above each bar."""
    marks: MaybeNumbers = ()
    """A short line across each bar, at this height."""
    hatched: Sequence[int] = ()
    """Indices of bars that are hatched instead of filled."""


@dataclass(frozen=True)
class Rule:
    """A straight line across a chart, at `value` of y or, if vertical, of x."""

    value: float
    name: str
    vertical: bool = False


@dataclass(frozen=True)
class Span:
    """A shaded stretch of the x axis."""

    low: float
    high: float
    name: str


@dataclass(frozen=True)
class Chart:
    """Lines, bars or both; with bars, x counts the categories from 0."""

    kind: ClassVar[str] = "chart"
    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    categories: Sequence[str] = ()
    mark_name: str = ""
    """What the marks of the bars are."""
    rules: Sequence[Rule] = ()
    spans: Sequence[Span] = ()
    title: str = ""
    key: str = ""


@dataclass(frozen=True)
class Frame:
    """One moment of a heat map that moves."""

    name: str
    values: Sequence[MaybeNumbers]
    texts: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class HeatMap:
    """A table of colours; cells below the low end of the scale are hatched, None is left empty."""

    kind: ClassVar[str] = "heat"
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[MaybeNumbers]
    x: Axis
    y: Axis
    value: Axis
    """Label and scale of the colours, `low` and `high` given."""
    texts: Sequence[Sequence[str]] = ()
    """Written into the cells."""
    framed: Sequence[tuple[int, int]] = ()
    """Row and column of cells with a frame."""
    upwards: bool = False
    """The first row stands at the bottom."""
    square: bool = False
    """Cells are as high as they are wide."""
    frames: Sequence[Frame] = ()
    title: str = ""
    key: str = ""
    details: Sequence[Sequence[str]] = ()
    """What a page tells of a cell that is pointed at or chosen, beside its value."""


@dataclass(frozen=True)
class Point:
    """One measured setting on a chart of quality against cost."""

    name: str
    x: float
    y: float
    x_low: float | None = None
    x_high: float | None = None
    y_low: float | None = None
    y_high: float | None = None
    group: str = ""
    optimal: bool | None = False
    """No other point is at least as good in both and better in one; None if that is not asked."""
    details: Sequence[str] = ()
    command: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Scatter:
    """Quality against a cost, the less the better."""

    kind: ClassVar[str] = "scatter"
    x: Axis
    y: Axis
    points: Sequence[Point]
    title: str = ""
    key: str = ""


@dataclass(frozen=True)
class LensTable:
    """What every layer would predict at every token; rows are layers, the last layer last."""

    layers: Sequence[int]
    predictions: Sequence[Sequence[str]]
    """[layer][token]"""
    probability: Sequence[MaybeNumbers]
    top: Sequence[Sequence[Sequence[int]]] = ()
    """[layer][token]: the likeliest tokens, as places in `words`."""
    top_probability: Sequence[Sequence[MaybeNumbers]] = ()
    words: Sequence[str] = ()
    statistics: Mapping[str, Sequence[MaybeNumbers]] = field(default_factory=dict)
    """By name, such as entropy: [layer][token]."""


@dataclass(frozen=True)
class TokenText:
    """A text, every token shaded by the depth it needed."""

    kind: ClassVar[str] = "tokens"
    tokens: Sequence[str]
    depth: MaybeNumbers
    """None for a token that is not shaded, as those of a prompt."""
    last: float
    """The greatest depth there is."""
    depth_name: str
    lens: LensTable | None = None
    title: str = ""
    key: str = ""


@dataclass(frozen=True)
class Diagram:
    """The blocks of an architecture in order; a `-` is an identity."""

    kind: ClassVar[str] = "diagram"
    blocks: Sequence[str]
    """`attention`, `dense` or `identity`"""
    facts: str = ""
    title: str = ""
    key: str = ""


Panel: TypeAlias = Chart | HeatMap | Scatter | TokenText | Diagram


@dataclass(frozen=True)
class FigureSpec:
    """One figure: its texts, and the panels that are drawn."""

    name: str
    """File name without its ending."""
    title: str
    caption: str
    """What is seen, in plain sentences that are true of the data shown."""
    panels: Sequence[Panel]
    subject: str = ""
    """The run or model that is shown."""
    command: str = ""
    """The command whose data is shown."""
    columns: int = 3
    """Panels beside one another."""
    choice: str = ""
    """If given, panels are alternatives: a page lets the reader choose this among their titles,
    and a picture is drawn of each."""
    wide: bool = False
    """The page gives it a whole line."""


class Finding(str):
    """A result in a plain sentence that the data bears out, and the command to go on with."""

    command: str

    def __new__(cls, text: str, command: str = "") -> Self:
        """Make a sentence with a command."""
        found = super().__new__(cls, text)
        found.command = command
        return found


@dataclass(frozen=True)
class Section:
    """What a method has to say about a run."""

    heading: str
    about: str = ""
    findings: Sequence[str] = ()
    """Results in plain sentences, each one borne out by the data; a `Finding` has a command."""
    figures: Sequence[FigureSpec] = ()
    question: str = COST
    """The one of `QUESTIONS` that its figures answer."""


@dataclass(frozen=True)
class Inspector:
    """A finished model of a method, to be tried on one text after another."""

    look: Callable[[str, float], Section]
    """Returns what the model does with a text at a value of its dial."""
    example: str
    """A text to begin with."""
    dial: str = ""
    """What can be set, in a few words; nothing where there is nothing to set."""
    low: float = 0.0
    high: float = 1.0
    usual: float = 0.0
    """The value of the dial to begin with."""


T = TypeVar("T")


def thin(items: Sequence[T], limit: int) -> list[T]:
    """Return at most so many items, evenly, the first and the last always among them."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def as_json(value: Any) -> Any:
    """Return a figure as JSON has it: numbers of five digits, and null for what is no number."""
    if dataclasses.is_dataclass(value):
        content = {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        kind = getattr(value, "kind", None)
        return content | {"kind": kind} if kind else content
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


# -- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder as its files show it."""

    name: str
    records: Sequence[Record]
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was wrong with the files and had to be left out, a sentence each."""
    path: str = ""
    """The folder, as it was given; of a trained model that ships, where it is unpacked."""

    @property
    def method(self) -> str:
        """The method that the settings name, or nothing."""
        return str(self.config.get("method") or "")

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return the records of these kinds, in the order they were written."""
        return [record for record in self.records if record.kind in kinds]


FigureBuilder: TypeAlias = Callable[[Run], FigureSpec | None]


def build_figures(run: Run, builders: Sequence[FigureBuilder]) -> list[FigureSpec]:
    """Return the figures that the run has data for."""
    return [figure for build in builders if (figure := build(run)) is not None]


def distinct_names(paths: Sequence[Path | str]) -> list[str]:
    """Return as much of the end of each path as tells it from the others."""
    parts = [Path(path).resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names


def read_run(path: Path | str) -> Run:
    """Read a run folder; UserError when it is not one or holds no record."""
    folder = RunFolder.open(path)
    notes = []
    records, num_corrupted = read_records(folder.metrics) if folder.metrics.exists() else ([], 0)
    if num_corrupted:
        notes.append(f"{num_corrupted} unreadable line(s) of {folder.metrics} skipped.")
    if not records:
        raise UserError(
            f"The run {path} has no record in {folder.metrics.name}, so there is nothing to draw; "
            "let it train until the first log line, or name another folder."
        )
    losses = [record.values.get("loss") for record in records]
    num_diverged = sum(isinstance(loss, float) and not math.isfinite(loss) for loss in losses)
    if num_diverged:
        notes.append(f"{num_diverged} loss(es) in {folder.metrics} not finite and left out.")
    config: dict[str, Any] = {}
    if folder.config.exists():
        try:
            config = read_config(str(path))
        except UserError:
            notes.append(f"{folder.config} is not readable and was left out.")
    return Run(Path(path).resolve().name, records, config, tuple(notes), str(folder.path))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make `folder` and turn a failure to write into it into a sentence for the user."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write into {folder} ({error.strerror or error}); choose another place with "
            "--out."
        ) from error


# -- values of records ------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """Return `value` as a finite float, or None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def share(value: Any) -> float | None:
    """Return `value` as a number from 0 to 1, or None; float32 may leave that range by 1e-5."""
    found = number(value)
    if found is None or not -1e-5 <= found <= 1 + 1e-5:
        return None
    return min(max(found, 0.0), 1.0)


def numbers(values: Mapping[str, Any], *names: str) -> list[float] | None:
    """Return the values under all of these names, or None if one is not a finite number."""
    found = [value for name in names if (value := number(values.get(name))) is not None]
    return found if len(found) == len(names) else None


def series(run: Run, kind: str, name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one quantity by rising step; the later record of a step counts."""
    found: dict[int, float] = {}
    for record in run.of_kind(kind):
        value = number(record.values.get(name))
        if value is not None:
            found[record.step] = value
    steps = sorted(found)
    return [float(step) for step in steps], [found[step] for step in steps]


def last_value(run: Run, name: str) -> Any:
    """Return the value of `name` in the last record that has one, or None."""
    return next(
        (r.values[name] for r in reversed(run.records) if r.values.get(name) is not None), None
    )


# -- texts ------------------------------------------------------------------------------------

_SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥"}


def visible(token: str) -> str:
    """Return a token with every character to be seen, on one line.

    Spaces, line ends and tabs become signs, control characters their escapes as Python writes
    them, and an empty token a sign of its own.
    """
    if not token:
        return "∅"
    # A combining mark alone would sit on whatever stands before it.
    start = "\N{DOTTED CIRCLE}" if unicodedata.combining(token[0]) else ""
    return start + "".join(_SIGNS.get(c) or (c if c.isprintable() else _escape(c)) for c in token)


def readable(token: str) -> str:
    """Return a token for running text: as `visible`, but a space beside other characters stays."""
    shown = visible(token)
    return shown.replace(_SIGNS[" "], " ") if shown.strip(_SIGNS[" "]) else shown


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shortened(text: str, limit: int = 40) -> str:
    """Return `text` on one line; of a long one the beginning and the end, and an ellipsis."""
    clean = " ".join(text.split())
    if len(clean) <= limit:
        return clean
    head = (limit - 1) // 2
    return f"{clean[:head]}…{clean[len(clean) - (limit - 1 - head) :]}"
