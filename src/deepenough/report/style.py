"""The look of every figure: palette, fonts, sizes, and how a figure is made and saved.

Notable choices:

- Colours are Okabe and Ito's, which people with any common colour blindness tell apart; the scale
  of probabilities is cividis, which looks the same to them and survives a grey print.
- Figures are bare `Figure` objects, never pyplot's, and are drawn from matplotlib's own defaults
  plus `RC`, so neither a user's matplotlibrc nor an earlier figure changes them, and nothing is
  left behind.
- No text is read as mathematics: a run called `a$b$` is shown as it is spelt.
- The same data give the same bytes: the PDF carries no date.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
from matplotlib import colors, font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deepenough.errors import UserError

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

#: Colours of lines on white, most distinct first; yellow is left out because it vanishes there.
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
LINE_STYLES = ("-", "--", ":", "-.")

#: The order in which a row of pi lists the branches, their letters, and colours of those drawn.
BRANCHES = ("attention", "dense", "identity")
LETTERS = "ad-"
BRANCH_COLORS = {"attention": SKY, "dense": ORANGE}

PROBABILITY_SCALE = "cividis"
INK = "#222222"
MUTED = "#555555"
FAINT = "#8A8A8A"

TITLE_SIZE = 11.0
TEXT_SIZE = 9.0
SMALL_SIZE = 8.0
LABEL_SIZE = 7.5
SCREEN_DPI = 150

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.titlelocation": "left",
    "axes.labelsize": TEXT_SIZE,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": SMALL_SIZE,
    "ytick.labelsize": SMALL_SIZE,
    "legend.fontsize": SMALL_SIZE,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "pdf.fonttype": 42,
}

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def applied() -> Iterator[None]:
    """Draw inside this context in the house style; every setting is restored on leaving it."""
    with matplotlib.style.context(["default", RC]):
        yield


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """A drawing function that runs in the house style whoever calls it."""

    @functools.wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with applied():
            return draw(*args, **kwargs)

    return inner


def new_figure(width: float, height: float) -> Figure:
    """A figure of that size in inches, laid out without overlap, with a canvas of its own."""
    # The resolution of the file, because the size of text depends on it a little: what was measured
    # while placing a label is then what is saved.
    figure = Figure((width, height), dpi=SCREEN_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def freeze_layout(figure: Figure) -> None:
    """Lay the figure out once and keep it so: text added later does not move the axes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write `<path>.png` and `<path>.pdf`; the folder is made when missing."""
    stem = Path(path)
    png, pdf = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf"))
    with applied(), writing(stem.parent):
        figure.savefig(png, dpi=SCREEN_DPI)
        figure.savefig(pdf, metadata={"CreationDate": None})
    return [png, pdf]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make `folder` and turn a failure to write into it into a sentence for the user."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write pictures into {folder} ({error.strerror or error}); "
            "choose a folder that can be written with --out."
        ) from error


def ink_on(background: Any) -> str:
    """Black or white, whichever has the higher WCAG contrast ratio on that colour."""
    channels = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in colors.to_rgb(background)
    ]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    contrast_black = (luminance + 0.05) / 0.05
    contrast_white = 1.05 / (luminance + 0.05)
    return "#000000" if contrast_black >= contrast_white else "#FFFFFF"


def shown(text: str, limit: int = 40) -> str:
    """`text` fit for a figure: one line, glyphs the font has, a long one without its middle."""
    glyphs = _glyphs()
    clean = "".join(
        c if c.isprintable() and ord(c) in glyphs else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    if len(clean) <= limit:
        return clean
    head = (limit - 1) // 2
    return f"{clean[:head]}…{clean[len(clean) - (limit - 1 - head) :]}"


@functools.cache
def _glyphs() -> frozenset[int]:
    font = font_manager.get_font(font_manager.findfont(RC["font.family"]))
    return frozenset(font.get_charmap())


def short_number(value: float, _position: int | None = None) -> str:
    """1500 -> 1.5k, 12000000 -> 12M, 0.35 -> 0.35; also serves as a matplotlib tick formatter."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
