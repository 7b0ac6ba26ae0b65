"""How modes and layers look in every figure of shortcuts.

A mode has one colour, marker and line everywhere, each of which alone tells it from the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepenough.report import style
from deepenough.report.shortcut_source import fitted_model
from deepenough.report.source import Run

#: Mode -> its name in legends, colour, marker, line.
LOOKS = {
    "id": ("id (no map)", style.BLACK, "s", "--"),
    "mat": ("mat (linear map)", style.BLUE, "o", "-"),
    "affine": ("affine map", style.SKY, "^", "-."),
    "tuned": ("KL-tuned map", style.VERMILION, "D", "-"),
    "attention": ("attention made linear", style.ORANGE, "v", "-"),
    "feed_forward": ("feed-forward made linear", style.GREEN, "P", "-."),
    "norms": ("norms made linear", style.PURPLE, "X", ":"),
}
#: A marker about this often along a curve: more would hide it.
NUM_MARKERS = 16
#: Below this distance the numbers of neighbouring layers would touch.
MIN_TICK_INCHES = 0.23


def mode_name(mode: str) -> str:
    """What a legend calls the mode."""
    return LOOKS[mode][0] if mode in LOOKS else style.shown(mode, 24)


def mode_color(mode: str) -> str:
    """Its colour."""
    return LOOKS[mode][1] if mode in LOOKS else style.MUTED


def mode_line(mode: str, num_points: int = 0) -> dict[str, Any]:
    """Its line with some markers, as arguments for `plot`."""
    _, color, marker, line = LOOKS.get(mode, ("", style.MUTED, ".", ":"))
    return {
        "color": color,
        "marker": marker,
        "linestyle": line,
        "markersize": 5.0 if marker in "PX" else 4.2,
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
        "markevery": max(1, round(num_points / NUM_MARKERS)),
    }


def layer_ticks(last: int, inches: float) -> np.ndarray:
    """Layers to number on an axis of that length from layer 0 to `last`; 0 is always among them.

    `last` is too wherever a step not much larger than needed allows it.
    """
    least = max(1, int(np.ceil(MIN_TICK_INCHES * (last + 1) / inches)))
    even = (step for step in range(least, 2 * least + 1) if last % step == 0)
    return np.arange(0, last + 1, next(even, least))


def headline(run: Run) -> str:
    """The name of the run, and of the model where it is another."""
    names = [style.shown(run.name), style.shown(fitted_model(run), 60)]
    return " · ".join(dict.fromkeys(name for name in names if name))
