"""The look of every picture: palette, fonts, sizes, and texts that can be drawn.

Colours are Okabe and Ito's, which people with any common colour blindness tell apart; the scale of
probabilities is cividis, which looks the same to them and survives a grey print. No text is read as
mathematics: a run called `a$b$` is shown as it is spelt.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import matplotlib.style
from matplotlib import colors, font_manager

from deepenough.figure import GREY, shortened

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

#: The palette in the order of `deepenough.figure`'s places, and the marker of each place.
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = "os^DvPX"

COLOR_SCALE = "cividis"
INK = "#222222"
MUTED = "#555555"
FAINT = "#8A8A8A"

TITLE_SIZE = 11.0
TEXT_SIZE = 9.0
SMALL_SIZE = 8.0
LABEL_SIZE = 7.5

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT_SIZE,
    "axes.titlesize": TITLE_SIZE,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
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
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR"),
    *("Noto Sans SC", "Noto Sans JP", "Noto Sans KR"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
    *("Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS"),
    *("Noto Sans Devanagari", "Noto Sans Bengali", "Noto Sans Tamil", "Noto Sans Thai"),
    *("Nirmala UI", "Leelawadee UI", "Noto Emoji", "Segoe UI Symbol"),
)


def applied() -> AbstractContextManager[None]:
    """Return a context with matplotlib's defaults and `RC`, whatever the user's own settings."""
    return matplotlib.style.context(["default", RC | {"font.family": list(families())}])


def color(place: int) -> str:
    """Return the colour of a place in the palette."""
    return FAINT if place == GREY else PALETTE[place % len(PALETTE)]


def marker(place: int) -> str:
    """Return the marker of a place in the palette."""
    return "." if place == GREY else MARKERS[place % len(MARKERS)]


def label(name: str) -> str:
    """Return a name as a legend shows it; matplotlib hides one that begins with `_`."""
    text = drawable(shortened(name, 44))
    return f" {text}" if text.startswith("_") else text


def ink_on(background: Any) -> str:
    """Return black or white, whichever has the higher WCAG contrast ratio on that colour."""
    channels = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in colors.to_rgb(background)
    ]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    # Both contrasts are equal where (L + 0.05)^2 = 1.05 * 0.05.
    return "#000000" if luminance > 0.179 else "#FFFFFF"


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
    """Return the characters that can be drawn."""
    paths = [font_manager.findfont(family) for family in families()]
    return frozenset().union(*(font_manager.get_font(path).get_charmap() for path in paths))


def short_number(value: float, _position: int | None = None) -> str:
    """Return 1500 as 1.5k, 12000000 as 12M, 0.35 as 0.35; also serves as a tick formatter."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
