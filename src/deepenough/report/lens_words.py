"""Tokens as readers see them: spaces, line ends and control characters made visible.

A token is not a word: ` the` and `the` are two, a line end is one, and half a character can be one.
What would be invisible, move the text around it, or stand for nothing gets a sign or its escape as
Python writes it; a browser finds a font for the rest. A drawing has the glyphs of the fonts that
are installed, and shows a sign for what none of them has.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable

from matplotlib import font_manager
from matplotlib.font_manager import FontProperties

from deepenough.report import style

SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥"}
EMPTY = "∅"
MISSING = "\N{REPLACEMENT CHARACTER}"
CIRCLE = "\N{DOTTED CIRCLE}"

#: Fonts with the scripts that DejaVu Sans lacks, as the common systems bring them.
MORE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP",
    "Noto Sans KR", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans",
    "Apple SD Gothic Neo", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Bengali",
    "Noto Sans Tamil", "Noto Sans Thai", "Nirmala UI", "Leelawadee UI", "Noto Emoji",
    "Segoe UI Symbol",
)  # fmt: skip


def visible(token: str) -> str:
    """The token with every character to be seen, on one line."""
    if not token:
        return EMPTY
    # A combining mark alone would sit on whatever stands before it.
    start = CIRCLE if unicodedata.combining(token[0]) else ""
    return start + "".join(SIGNS.get(c) or (c if c.isprintable() else _escape(c)) for c in token)


def readable(token: str) -> str:
    """The same for running text: a space beside other characters is one, as readers expect."""
    shown = visible(token)
    return shown.replace(SIGNS[" "], " ") if shown.strip(SIGNS[" "]) else shown


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def drawable(token: str) -> str:
    """The same, with a sign for every character that no installed font can draw."""
    glyphs = _glyphs()
    return "".join(c if ord(c) in glyphs else MISSING for c in visible(token))


def shorten(text: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning of `text` that fits, an ellipsis in place of the rest."""
    if fits(text):
        return text
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(f"{text[:middle]}…") else (low, middle - 1)
    return f"{text[:low]}…"


@functools.cache
def families() -> tuple[str, ...]:
    """The font of all figures, then what is installed of the others."""
    installed = set(font_manager.get_font_names())
    return (style.RC["font.family"], *(name for name in MORE_FONTS if name in installed))


@functools.cache
def _glyphs() -> frozenset[int]:
    """Characters that can be drawn in both weights; a bold font may have fewer than its regular."""
    of_weight = []
    for weight in ("normal", "bold"):
        found: set[int] = set()
        for family in families():
            path = font_manager.findfont(FontProperties(family=family, weight=weight))
            found.update(font_manager.get_font(path).get_charmap())
        of_weight.append(found)
    return frozenset(of_weight[0] & of_weight[1])
