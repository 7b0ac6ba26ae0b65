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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib import colors, font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from deepenough.errors import UserError

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

#: The palette in the order of `deepenough.figure`'s places, the marker of each place, and lines.
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = "os^DvPX"
LINE_STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "none": "none"}

BRANCH_COLORS = {"attention": SKY, "dense": ORANGE}

COLOR_SCALE = "cividis"
#: From improbable to certain; black text has a contrast of 6:1 or more on all of it.
TEXT_SHADES = ("#FFFFFF", "#4292C6")
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
    "svg.hashsalt": "deepenough",
}

#: Fonts with the scripts that DejaVu Sans lacks, as the common systems bring them.
MORE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP",
    "Noto Sans KR", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans",
    "Apple SD Gothic Neo", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Bengali",
    "Noto Sans Tamil", "Noto Sans Thai", "Nirmala UI", "Leelawadee UI", "Noto Emoji",
    "Segoe UI Symbol",
)  # fmt: skip


@contextmanager
def applied() -> Iterator[None]:
    """Draw inside this context in the house style; every setting is restored on leaving it."""
    with matplotlib.style.context(["default", RC | {"font.family": list(families())}]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of that size in inches, laid out without overlap, with its own canvas."""
    # The resolution of the file, because the size of text depends on it a little: what was measured
    # while placing a label is then what is saved.
    figure = Figure((width, height), dpi=SCREEN_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def freeze_layout(figure: Figure) -> None:
    """Lay the figure out once and keep it so: text added later does not move the axes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


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
    """Return black or white, whichever has the higher WCAG contrast ratio on that colour."""
    channels = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in colors.to_rgb(background)
    ]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    contrast_black = (luminance + 0.05) / 0.05
    contrast_white = 1.05 / (luminance + 0.05)
    return "#000000" if contrast_black >= contrast_white else "#FFFFFF"


def drawable(text: str) -> str:
    """Return `text` on one line, with a sign for every character that no installed font has."""
    glyphs = _glyphs()
    return "".join(
        c if ord(c) in glyphs and c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )


@functools.cache
def families() -> tuple[str, ...]:
    """Return the font of all figures, then those of `MORE_FONTS` that are installed."""
    installed = set(font_manager.get_font_names())
    return (RC["font.family"], *(name for name in MORE_FONTS if name in installed))


@functools.cache
def _glyphs() -> frozenset[int]:
    """Return the characters that can be drawn in both weights; a bold font may have fewer."""
    of_weight = []
    for weight in ("normal", "bold"):
        found: set[int] = set()
        for family in families():
            path = font_manager.findfont(FontProperties(family=family, weight=weight))
            found.update(font_manager.get_font(path).get_charmap())
        of_weight.append(found)
    return frozenset(of_weight[0] & of_weight[1])


def short_number(value: float, _position: int | None = None) -> str:
    """Return 1500 as 1.5k, 12000000 as 12M, 0.35 as 0.35; also serves as a tick formatter."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
