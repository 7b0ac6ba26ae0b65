"""The heat map of block-type probabilities over training, as a GIF.

One palette, the scale of the probabilities and some greys, serves all frames without dithering:
colours do not flicker from frame to frame, and the file stays small. If it is still too large for
a page or a message, as with very many blocks, every second frame is left out until it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import cast

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from deepenough.report import style
from deepenough.report.blocks import describe, heat_map
from deepenough.report.source import BlockState, Run, block_states

MAX_FRAMES = 60
FRAME_MS = 120
LAST_FRAME_MS = 2500
GIF_DPI = 100
MAX_BYTES = 1_400_000
NUM_SCALE_COLORS = 48
NUM_GREYS = 16


@dataclass(frozen=True)
class Animation:
    """Frames of one size and one palette, the last of them held."""

    frames: Sequence[Image.Image]

    def save(self, path: Path | str) -> list[Path]:
        """Write `<path>.gif`, which repeats for ever."""
        gif = Path(path).with_name(f"{Path(path).name}.gif")
        frames = list(self.frames)
        while len(content := _encode(frames)) > MAX_BYTES and len(frames) > 2:
            # Counted from the end, so that the final state stays.
            frames = frames[::-2][::-1]
        with style.writing(gif.parent):
            gif.write_bytes(content)
        return [gif]


def _encode(frames: Sequence[Image.Image]) -> bytes:
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    file = BytesIO()
    frames[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        optimize=False,
    )
    return file.getvalue()


def spread(states: Sequence[BlockState], limit: int = MAX_FRAMES) -> list[BlockState]:
    """At most `limit` states, evenly over the recorded ones, first and last always among them."""
    picks = np.unique(np.linspace(0, len(states) - 1, min(limit, len(states))).round().astype(int))
    return [states[i] for i in picks]


@style.styled
def animate_blocks(run: Run, limit: int = MAX_FRAMES) -> Animation | None:
    """The search over training, or None where there are not two states to move between."""
    states = spread(block_states(run), min(limit, MAX_FRAMES))
    if len(states) < 2:
        return None
    drawn = heat_map(states[-1], describe(run, states[-1]))
    drawn.figure.set_dpi(GIF_DPI)
    style.freeze_layout(drawn.figure)
    canvas = cast(FigureCanvasAgg, drawn.figure.canvas)
    pictures = []
    for state in states:
        drawn.show(state, describe(run, state))
        canvas.draw()
        pictures.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    palette = _palette()
    return Animation([p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures])


def _palette() -> Image.Image:
    """An image whose only purpose is to carry the colours of all frames."""
    scale = matplotlib.colormaps[style.PROBABILITY_SCALE](np.linspace(0, 1, NUM_SCALE_COLORS))[
        :, :3
    ]
    greys = np.linspace(0, 1, NUM_GREYS)[:, None].repeat(3, axis=1)
    carrier = Image.new("P", (1, 1))
    carrier.putpalette((np.vstack([greys, scale]) * 255).round().astype(np.uint8).tobytes())
    return carrier
