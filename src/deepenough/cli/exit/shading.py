"""Text shaded by depth, for a terminal: the darker a token, the more layers ran for it.

The ramp is cividis (Nunez and others 2018), which looks the same to people who see red and green
alike. Where there is no terminal, or NO_COLOR is set, the text is plain.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_RAMP = ((254, 232, 56), (188, 174, 108), (125, 124, 120), (67, 78, 108), (0, 34, 78))


def shade(depth: float, layers: int) -> str:
    """A rich style for `depth` of `layers` layers; none for a depth that is not known."""
    if depth < 1:
        return ""
    place = min(max((depth - 1) / max(layers - 1, 1), 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    share = place - low
    red, green, blue = (
        round(a + share * (b - a)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)
    )
    light = 0.299 * red + 0.587 * green + 0.114 * blue
    return f"{'black' if light > 120 else 'white'} on rgb({red},{green},{blue})"


def shaded(pieces: Sequence[str], depths: Sequence[int], layers: int) -> Text:
    """Tokens in the shade of their depths."""
    text = Text()
    for piece, depth in zip(pieces, depths, strict=True):
        text.append(piece, style=shade(depth, layers))
    return text


def legend(depths: Sequence[int], layers: int) -> Text:
    """The depths that occur, each in its shade."""
    text = Text("layers: ")
    for depth in sorted(set(depths)):
        text.append(f" {depth} ", style=shade(depth, layers))
    return text
