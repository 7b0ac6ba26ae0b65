"""The lens as a page to explore: one file that opens without a network, Plotly inside.

Every lens of the run stands in it, the latest first. A cell under the pointer tells its whole word
and exact probability. Words come from a model and from anyone's prompt: they are escaped for the
page and again for Plotly, which reads some tags in texts itself, and the page forbids the browser
to load or send anything.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import plotly.io
import plotly.offline

from deepenough.report import style
from deepenough.report.lens_source import Lens, lenses
from deepenough.report.lens_table import KNOWN_COLOR, SHADES
from deepenough.report.lens_words import visible
from deepenough.report.shortcut_look import headline, mode_name
from deepenough.report.source import Run

MAX_BYTES = 6_000_000
#: More cells than this make a browser slow; a long prompt keeps its end, old lenses go first.
MAX_CELLS = 12_000
MAX_WORD = 60
MAX_PROMPT = 2000

ROW_PIXELS = 22
LETTER_PIXELS = 7.4
CELL_PIXELS = (52, 110)
FONT = {
    "family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
    "size": 12,
    "color": style.INK,
}
#: Saving a picture is all that is offered; the other buttons zoom, or send the chart away.
CONFIG = {"displaylogo": False, "responsive": False, "modeBarButtons": [["toImage"]]}

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; \
form-action 'none'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; margin: 1.5rem; \
color: {ink}; }}
h1 {{ font-size: 1.2rem; }}
h2 {{ font-size: 1rem; margin: 2rem 0 0.3rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
p {{ margin: 0.3rem 0; color: {muted}; }}
.lens {{ overflow-x: auto; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
<p>Each cell: the word that a layer would say after the token below (a masked model: in its \
place). Darker: more probable. Bold: the last layer's word. Line: every layer's from there.</p>
{sections}
</body>
</html>
"""


@dataclass(frozen=True)
class Page:
    """A finished page."""

    content: str

    def save(self, path: Path | str) -> list[Path]:
        """Write `<path>.html`."""
        file = Path(path).with_name(f"{Path(path).name}.html")
        with style.writing(file.parent):
            file.write_text(self.content, encoding="utf-8")
        return [file]


def lens_page(run: Run) -> Page | None:
    """The page of all lenses of a run, or None if it has none."""
    found = lenses(run)
    if not found:
        return None
    cells = MAX_CELLS
    while len((content := _page(headline(run), _within(found, cells))).encode()) > MAX_BYTES:
        # Words of the longest kind in a script of many bytes a letter; half as many fit.
        cells //= 2
        if cells < 100:
            break
    return Page(content)


def _within(found: Sequence[Lens], cells: int) -> list[Lens]:
    """As many lenses from the first on as have that many cells; the first always, if cut."""
    kept = [found[0].last_tokens(max(1, cells // len(found[0].layers)))]
    cells -= kept[0].probability.size
    for lens in found[1:]:
        cells -= lens.probability.size
        if cells < 0:
            break
        kept.append(lens)
    return kept


def _page(title: str, shown: Sequence[Lens]) -> str:
    sections = [_section(lens, f"lens-{i}") for i, lens in enumerate(shown, start=1)]
    return PAGE.format(
        title=html.escape(f"Lens of {title}"),
        ink=style.INK,
        muted=style.MUTED,
        plotly=plotly.offline.get_plotlyjs(),
        sections="\n".join(sections),
    )


def _section(lens: Lens, name: str) -> str:
    total = lens.first + len(lens.tokens)
    cut = f" · tokens {lens.first + 1} to {total} of {total}" if lens.first else ""
    body = plotly.io.to_html(
        _figure(lens), full_html=False, include_plotlyjs=False, div_id=name, config=CONFIG,
    )  # fmt: skip
    prompt = lens.prompt if len(lens.prompt) <= MAX_PROMPT else f"{lens.prompt[:MAX_PROMPT]}…"
    # Line by line, so that the lines of a prompt stay while its control characters show.
    heading = "\n".join(visible(line).replace("␣", " ") for line in prompt.splitlines() or [""])
    return (
        f"<section>\n<h2>{html.escape(heading)}</h2>\n"
        f"<p>{html.escape(mode_name(lens.mode) + cut)}</p>\n"
        f'<div class="lens">{body}</div>\n</section>'
    )


def _figure(lens: Lens) -> go.Figure:
    num_rows, num_tokens = lens.probability.shape
    cell = _cell_pixels(lens)
    letters = int(cell / LETTER_PIXELS)
    rows = list(range(num_rows))
    figure = go.Figure(
        go.Heatmap(
            z=lens.probability.astype(np.float32),
            y=rows,
            text=[
                [_word(word, letters, bold) for word, bold in zip(*row, strict=True)]
                for row in zip(lens.words, lens.agrees, strict=True)
            ],
            customdata=[[_text(word, MAX_WORD) for word in row] for row in lens.words],
            texttemplate="%{text}",
            textfont={"size": 11, "color": style.BLACK},
            hovertemplate="layer %{y} after <b>%{x}</b><br>says <b>%{customdata}</b><br>"
            "probability %{z:.3f}<extra></extra>",
            colorscale=[[0, SHADES[0]], [1, SHADES[1]]],
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "probability", "side": "right"}, "thickness": 14},
        )
    )
    figure.add_trace(_known_line(lens))
    figure.update_layout(
        width=cell * num_tokens + 170,
        height=ROW_PIXELS * num_rows + 124,
        margin={"l": 60, "r": 90, "t": 34, "b": 90},
        font=FONT,
        plot_bgcolor="white",
        dragmode=False,
        showlegend=False,
        xaxis={
            "title": {"text": "token read"},
            "tickvals": list(range(num_tokens)),
            "ticktext": [_text(token, letters) for token in lens.tokens],
            "range": [-0.5, num_tokens - 0.5],
            "showgrid": False,
            "zeroline": False,
            "tickangle": 0,
        },
        yaxis={
            "title": {"text": "layer"},
            "tickvals": rows,
            "ticks": "outside",
            "tickcolor": "white",
            "ticktext": [str(layer) for layer in lens.layers],
            "range": [-0.5, num_rows - 0.5],
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure


def _known_line(lens: Lens) -> go.Scatter:
    """One trace for all columns, broken between them."""
    x: list[float | None] = []
    y: list[float | None] = []
    for token, row in enumerate(lens.known_from().tolist()):
        # Known from the last layer alone says nothing.
        if row < len(lens.layers) - 1:
            x += [token - 0.46, token + 0.46, None]
            y += [row - 0.5, row - 0.5, None]
    return go.Scatter(
        x=x, y=y, mode="lines", line={"color": KNOWN_COLOR, "width": 3}, hoverinfo="skip",
        cliponaxis=False,
    )  # fmt: skip


def _cell_pixels(lens: Lens) -> int:
    """Wide enough for most words; the rare long one is cut in its cell and whole on hovering."""
    lengths = [len(visible(word)) for row in lens.words for word in row]
    low, high = CELL_PIXELS
    return int(np.clip((np.quantile(lengths, 0.97) + 1) * LETTER_PIXELS, low, high))


def _word(word: str, letters: int, bold: bool) -> str:
    text = _text(word, letters)
    return f"<b>{text}</b>" if bold else text


def _text(token: str, letters: int) -> str:
    text = visible(token[:MAX_WORD])
    if len(text) > letters or len(token) > MAX_WORD:
        text = f"{text[: letters - 1]}…"
    # Plotly knows &lt; &gt; and &amp; but would show &quot; as it is spelt.
    return html.escape(text, quote=False)
