"""The matplotlib renderer: a `FigureSpec` as PNG, PDF, SVG and, where it moves, GIF.

Notable choices:

- Charts and heat maps of a figure share one picture, in rows of `spec.columns` panels; where the
  panels are alternatives (`spec.choice`), and for scatters, texts and diagrams, each is a picture.
- The legend of all panels stands below them, once.
- A GIF has one palette without dithering: colours do not flicker from frame to frame, and the file
  stays small. If it is still too large for a page or a message, every second frame is left out.
- The same data give the same bytes: the files carry no date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib import colors
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.scale import FuncScale
from matplotlib.text import Text
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)
from PIL import Image

from deepenough.errors import UserError
from deepenough.figure import (
    GREY,
    Axis,
    Bars,
    Chart,
    Diagram,
    FigureSpec,
    Frame,
    HeatMap,
    Line,
    Panel,
    Scatter,
    TokenText,
    shortened,
)
from deepenough.report import style
from deepenough.report.pictures import draw_diagram, draw_lens, draw_tokens
from deepenough.report.scatter import Label, Segment, draw_scatter, place_labels

FORMATS = ("png", "pdf", "svg", "gif")
_NO_DATE = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}

# Inches of a chart, by the number of panels beside one another.
CHART_SIZES = {1: (7.2, 4.3), 2: (4.9, 3.6), 3: (3.7, 2.8)}
SQUARE_INCHES = 3.7
MAX_WIDTH = 16.0
BAR_SHARE = 0.8
#: A marker about this often along a line: more would hide it.
NUM_MARKERS = 16
#: Narrower cells have their text turned upright.
UPRIGHT_BELOW_INCHES = 0.34
BELOW_COLOR = "#DCDCDC"
HATCH = "/////"
#: Where an axis of squared cosines has its ticks.
ANGLE_TICKS = (0.0, 0.5, 0.8, 0.9, 0.97, 0.99, 0.999, 1.0)

MAX_FRAMES = 60
FRAME_MS = 120
LAST_FRAME_MS = 2500
GIF_DPI = 100
MAX_GIF_BYTES = 1_400_000


# -- files ------------------------------------------------------------------------------------


def save(spec: FigureSpec, folder: Path | str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a figure into `folder` and return the files written."""
    written = []
    with style.applied(), style.writing(Path(folder)):
        for name, figure in draw(spec):
            style.freeze_layout(figure)  # once, not once a file
            for ending in (ending for ending in formats if ending != "gif"):
                file = Path(folder) / f"{name}.{ending}"
                metadata = cast("dict[str, Any] | None", _NO_DATE[ending])
                figure.savefig(file, dpi=style.SCREEN_DPI, metadata=metadata)
                written.append(file)
        for panel in spec.panels if "gif" in formats else ():
            if isinstance(panel, HeatMap) and len(panel.frames) > 1:
                file = Path(folder) / f"{spec.name}.gif"
                file.write_bytes(encode_gif(animate(spec, panel)))
                written.append(file)
    return written


def draw(spec: FigureSpec) -> list[tuple[str, Figure]]:
    """Return the pictures of a figure, each with its file name without the ending."""
    if not spec.panels:
        raise UserError(f"The figure {spec.title!r} has nothing to draw.")
    with style.applied():
        together = all(isinstance(panel, Chart | HeatMap) for panel in spec.panels)
        if together and not spec.choice:
            return [(spec.name, _Grid(spec, spec.panels).figure)]
        return [
            (f"{spec.name}_{panel.key}" if panel.key else spec.name, _draw_alone(spec, panel))
            for panel in spec.panels
        ]


def _draw_alone(spec: FigureSpec, panel: Panel) -> Figure:
    heading = title_of(spec)
    if isinstance(panel, Scatter):
        return draw_scatter(panel, heading)
    if isinstance(panel, Diagram):
        return draw_diagram(panel, heading)
    if isinstance(panel, TokenText):
        return draw_tokens(panel, heading) if panel.lens is None else draw_lens(panel, panel.lens)
    return _Grid(spec, [panel]).figure


def title_of(spec: FigureSpec, limit: int = 90) -> str:
    """Return the title of a picture: what is shown, and of what."""
    parts = [spec.title, shortened(spec.subject, 60)]
    return style.drawable(shortened(" · ".join(part for part in parts if part), limit))


# -- charts and heat maps ---------------------------------------------------------------------


class _Grid:
    """A picture of charts and heat maps in rows, with one legend."""

    def __init__(self, spec: FigureSpec, panels: Sequence[Panel]) -> None:
        self.columns = min(spec.columns, len(panels))
        self.panels = cast("Sequence[Chart | HeatMap]", panels)
        self.names = _names(self.panels)
        rows = [list(panels[i : i + self.columns]) for i in range(0, len(panels), self.columns)]
        sizes = [[self._size(panel) for panel in row] for row in rows]
        widths = [max(row[i][0] for row in sizes if i < len(row)) for i in range(self.columns)]
        heights = [max(height for _, height in row) for row in sizes]
        entries = list(self._legend())
        self.width = max(sum(widths), 5.0)
        longest = max((len(text) for _, text in entries), default=1)
        per_row = max(1, int(self.width / (0.7 + 0.075 * longest)))
        room = 0.45 + 0.22 * -(-len(entries) // per_row)
        self.figure = style.new_figure(self.width, sum(heights) + room)
        grid = self.figure.add_gridspec(
            len(rows), self.columns, width_ratios=widths, height_ratios=heights
        )
        self.maps: list[_HeatMapArtist] = []
        labelled: list[tuple[Axes, Chart]] = []
        for i, panel in enumerate(self.panels):
            axes = self.figure.add_subplot(grid[divmod(i, self.columns)])
            chars = int(widths[i % self.columns] * 12.5)
            self._set_title(axes, panel.title, chars)
            if isinstance(panel, Chart):
                _draw_chart(axes, panel, self.names, widths[i % self.columns])
                if any(line.labels for line in panel.lines):
                    labelled.append((axes, panel))
            else:
                self.maps.append(_HeatMapArtist(axes, panel))
        if entries:
            handles, texts = zip(*entries, strict=True)
            self.figure.legend(
                handles, texts, loc="outside lower center", ncols=min(per_row, len(entries))
            )
        self.heading = self.figure.suptitle(
            title_of(spec, int(self.width * 13)), x=0.01, ha="left", fontsize=style.TITLE_SIZE
        )
        if labelled:
            style.freeze_layout(self.figure)
        for axes, chart in labelled:
            _label_points(axes, chart)

    def _set_title(self, axes: Axes, title: str, chars: int) -> None:
        if title:
            lines = textwrap.wrap(style.drawable(title), max(20, chars))[:3]
            axes.set_title("\n".join(lines), fontsize=style.TEXT_SIZE)

    def _size(self, panel: Panel) -> tuple[float, float]:
        if isinstance(panel, HeatMap):
            return _map_size(panel)
        width, height = CHART_SIZES[min(self.columns, 3)]
        if isinstance(panel, Chart) and panel.bars:
            places = range(len(panel.categories))
            most = max(sum(b.values[i] is not None for b in panel.bars) for i in places)
            width = max(width, 1.0 + len(places) * (0.12 + 0.32 * most))
        return min(width, MAX_WIDTH), height

    def _legend(self) -> Iterator[tuple[Artist, str]]:
        """Yield what tells the names apart; nothing for a single one."""
        charts = [panel for panel in self.panels if isinstance(panel, Chart)]
        found: dict[str, Artist] = {}
        for chart in charts:
            for line in chart.lines:
                handle = Line2D([], [], **_line_look(line, self.names.index(line.name)))
                found.setdefault(line.name, handle)
            for bars in chart.bars:
                color = _color(bars.color, self.names.index(bars.name))
                found.setdefault(bars.name, Patch(color=color))
        for chart in charts:
            if chart.mark_name:
                found.setdefault(chart.mark_name, Line2D([], [], **_MARK))
            for rule in chart.rules:
                found.setdefault(rule.name, Line2D([], [], **_rule_look(rule.vertical)))
        for panel in self.panels:
            found.pop(panel.title, None)  # a panel of its own needs no entry
        if len(found) > 1:
            for name, entry in found.items():
                yield entry, style.drawable(shortened(name, 44))
        for panel in self.panels:
            if isinstance(panel, HeatMap) and _below(panel, panel.values).any():
                look: dict[str, Any] = {"facecolor": BELOW_COLOR, "edgecolor": style.FAINT}
                yield Patch(hatch=HATCH, linewidth=0, **look), f"below {panel.value.low or 0:g}"
                break


def _names(panels: Sequence[Chart | HeatMap]) -> list[str]:
    """Return the names of lines and bars in the order in which they first come up."""
    charts = [panel for panel in panels if isinstance(panel, Chart)]
    return list(
        dict.fromkeys(
            item.name
            for chart in charts
            for item in cast("Sequence[Line | Bars]", (*chart.lines, *chart.bars))
        )
    )


def _color(place: int | None, index: int) -> str:
    if place == GREY:
        return style.FAINT
    return style.PALETTE[(index if place is None else place) % len(style.PALETTE)]


#: A dark line with a light edge shows on bars of every colour.
_MARK: dict[str, Any] = {
    "color": style.INK,
    "linewidth": 2.0,
    "path_effects": [withStroke(linewidth=4.0, foreground="white")],
}


def _rule_look(vertical: bool) -> dict[str, Any]:
    line = "--" if vertical else ":"
    return {"color": style.MUTED, "linestyle": line, "linewidth": 1.1}


def _line_look(line: Line, index: int) -> dict[str, Any]:
    color = _color(line.color, index)
    place = index if line.color is None else line.color
    # With more names than colours, the second round is dashed.
    again = line.color is None and index >= len(style.PALETTE) and line.style == "solid"
    joined = "--" if again else style.LINE_STYLES[line.style]
    look: dict[str, Any] = {"color": color, "linestyle": joined}
    if line.marker:
        marker = style.MARKERS[place % len(style.MARKERS)] if line.color != GREY else "."
        look |= {"marker": marker, "markersize": 4.4, "markeredgewidth": 0.4}
        look |= {"markeredgecolor": "white"}
        if line.style == "dotted":
            look |= {"markerfacecolor": "white", "markeredgecolor": color, "linewidth": 1.2}
        if line.style != "none":
            look["markevery"] = max(1, round(len(line.x) / NUM_MARKERS))
    if line.color == GREY and not line.marker:
        look |= {"linewidth": 0.6, "alpha": 0.5}
    return look


def _draw_chart(axes: Axes, chart: Chart, names: Sequence[str], width: float) -> None:
    for span in chart.spans:
        axes.axvspan(span.low, span.high, color=style.YELLOW, alpha=0.18, linewidth=0)
        axes.text(span.low, 0.02, f" {span.name}", transform=axes.get_xaxis_transform(),
                  fontsize=style.LABEL_SIZE, color=style.MUTED, va="bottom")  # fmt: skip
    for rule in chart.rules:
        mark = axes.axvline if rule.vertical else axes.axhline
        mark(rule.value, zorder=3 if rule.vertical else 2, **_rule_look(rule.vertical))
    for line in chart.lines:
        index = names.index(line.name)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=_color(line.color, index),
                              alpha=0.2, linewidth=0)  # fmt: skip
        order = 2 if line.color == GREY else 4 if line.style == "none" else 3
        axes.plot(line.x, line.y, zorder=order, **_line_look(line, index))
    if chart.bars:
        _draw_bars(axes, chart, names)
    # A panel's title says what its vertical axis shows, where both would be the same words.
    y = replace(chart.y, label="") if chart.y.label == chart.title else chart.y
    _set_axis(axes, "y", y)
    _set_axis(axes, "x", chart.x)
    if chart.bars:
        every = max(1, int(np.ceil(0.3 * len(chart.categories) / width)))
        places = range(0, len(chart.categories), every)
        axes.set_xticks(places, [style.drawable(chart.categories[place]) for place in places])
        axes.set_xlim(-0.6, len(chart.categories) - 0.4)
        axes.grid(axis="x", visible=False)


def _draw_bars(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    for place in range(len(chart.categories)):
        here = [bars for bars in chart.bars if bars.values[place] is not None]
        part = BAR_SHARE / max(1, len(here))
        for i, bars in enumerate(here):
            x, value = place + (i + 0.5) * part - BAR_SHARE / 2, bars.values[place] or 0.0
            color = _color(bars.color, names.index(bars.name))
            look: dict[str, Any] = {"color": color}
            if place in bars.hatched:
                look = {"facecolor": "white", "edgecolor": color, "hatch": "////"}
            axes.bar(x, value, width=0.92 * part, zorder=2.5, **look)
            top = value
            mark = bars.marks[place] if bars.marks else None
            if mark is not None:
                axes.plot([x - 0.46 * part, x + 0.46 * part], [mark, mark], zorder=3, **_MARK)
                top = max(top, mark)
            if bars.texts:
                axes.annotate(bars.texts[place], (x, top), (0, 3), textcoords="offset points",
                              ha="center", va="bottom", fontsize=style.LABEL_SIZE)  # fmt: skip
    if any(bars.texts for bars in chart.bars):
        axes.margins(y=0.1)


def _angle_scale(axis: Any) -> FuncScale:
    def forward(value: Any) -> Any:
        return 1.0 - np.sqrt(np.clip(1.0 - np.asarray(value), 0.0, 1.0))

    def backward(place: Any) -> Any:
        return 1.0 - (1.0 - np.asarray(place)) ** 2

    return FuncScale(axis, (forward, backward))


def _set_axis(axes: Axes, which: str, spec: Axis) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    axis.set_label_text(style.drawable(spec.label))
    if spec.scale == "log":
        (axes.set_xscale if which == "x" else axes.set_yscale)("log", nonpositive="mask")
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    elif spec.scale == "angle":
        axes.set_yscale(_angle_scale(axis))
        axis.set_major_locator(FixedLocator(ANGLE_TICKS))
    else:
        axis.set_major_locator(MaxNLocator(5 if which == "x" else 6, integer=spec.whole))
    if spec.low is not None or spec.high is not None:
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        set_limits(low if spec.low is None else spec.low, high if spec.high is None else spec.high)
    axis.set_major_formatter(FuncFormatter(_percent if spec.percent else style.short_number))


def _percent(value: float, _position: int | None = None) -> str:
    return f"{100 * value:.4g}%"


def _label_points(axes: Axes, chart: Chart) -> None:
    labels = [
        Label(x, y, text)
        for line in chart.lines
        for x, y, text in zip(line.x, line.y, line.labels, strict=False)
    ]
    segments: list[Segment] = []
    for line in chart.lines:
        points = list(zip(line.x, line.y, strict=True))
        segments += list(pairwise(points))
    place_labels(axes, labels, avoid=segments)


# -- heat maps --------------------------------------------------------------------------------


def _map_size(panel: HeatMap) -> tuple[float, float]:
    if panel.square:
        return SQUARE_INCHES + 0.9, SQUARE_INCHES + 0.5
    letters = max((len(text) for row in panel.texts for text in row), default=1)
    cell = max(0.30, 0.12 + 0.075 * letters, 2.6 / len(panel.columns))
    names = 0.3 + 0.075 * max(map(len, panel.rows), default=1)
    width = names + cell * len(panel.columns) + 1.0
    row = 0.45 if len(panel.rows) <= 4 else 0.24
    return min(max(width, 4.0), MAX_WIDTH), 0.9 + row * len(panel.rows)


def _below(panel: HeatMap, values: Any) -> np.ndarray:
    table = np.array(values, dtype=float)
    return np.nan_to_num(table, nan=panel.value.low or 0.0) < (panel.value.low or 0.0)


def _norm(scale: Axis) -> colors.Normalize:
    low, high = scale.low or 0.0, 1.0 if scale.high is None else scale.high
    if scale.scale == "root":
        return colors.PowerNorm(0.5, low, high)
    if scale.scale == "angle":
        transform = _angle_scale(None).get_transform()
        pair: tuple[Callable[..., Any], Callable[..., Any]] = (
            transform.transform,
            transform.inverted().transform,
        )
        return colors.FuncNorm(pair, low, high)
    return colors.Normalize(low, high if high > low else low + 1.0)


class _HeatMapArtist:
    """A drawn heat map whose values can be replaced, as a GIF does."""

    def __init__(self, axes: Axes, panel: HeatMap) -> None:
        self.axes, self.panel, self.norm = axes, panel, _norm(panel.value)
        self.texts: list[Text] = []
        rows, columns = len(panel.rows), len(panel.columns)
        self.scale = matplotlib.colormaps[style.COLOR_SCALE].with_extremes(
            under=BELOW_COLOR, bad="white"
        )
        self.image: AxesImage = axes.imshow(
            np.array(panel.values, dtype=float), cmap=self.scale, norm=self.norm,
            aspect="equal" if panel.square else "auto", interpolation="nearest",
            origin="lower" if panel.upwards else "upper",
        )  # fmt: skip
        width, height = _map_size(panel)
        room = SQUARE_INCHES if panel.square else width - 1.6
        self.cell = room / columns
        every = max(1, int(np.ceil(0.24 / self.cell)))
        axes.set_xticks(
            range(0, columns, every), [style.drawable(c) for c in panel.columns[::every]]
        )
        every = max(1, int(np.ceil(0.16 * rows / (height - 0.9))))
        axes.set_yticks(range(0, rows, every), [style.drawable(r) for r in panel.rows[::every]])
        axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if not panel.square:
            # White gaps between the cells: neighbours of nearly one colour stay countable.
            for edge in range(1, columns):
                axes.axvline(edge - 0.5, color="white", linewidth=1.0)
            for edge in range(1, rows):
                axes.axhline(edge - 0.5, color="white", linewidth=1.0)
        for row, column in panel.framed:
            # Within its cell: frames that touched would make a frame of a cell between them.
            look: dict[str, Any] = {"fill": False, "edgecolor": style.VERMILION, "linewidth": 1.6}
            axes.add_patch(Rectangle((column - 0.46, row - 0.41), 0.92, 0.82, **look))
        self._hatch()
        bar = axes.figure.colorbar(self.image, ax=axes, pad=0.02, fraction=0.046)
        bar.set_label(panel.value.label)
        bar.outline.set_visible(False)  # type: ignore[operator]
        if panel.value.percent:
            bar.ax.yaxis.set_major_formatter(FuncFormatter(_percent))
        self.show(panel.values, panel.texts)

    def _hatch(self) -> None:
        cells = np.argwhere(_below(self.panel, self.panel.values))
        if len(cells):
            corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
            squares = [corners + np.array([column, row]) for row, column in cells]
            hatched = PolyCollection(squares, hatch=HATCH, facecolor="none", linewidth=0)
            hatched.set_edgecolor(style.FAINT)
            self.axes.add_collection(hatched, autolim=False)

    def show(self, values: Any, texts: Sequence[Sequence[str]]) -> None:
        """Replace the values and their texts."""
        table = np.array(values, dtype=float)
        self.image.set_data(table)
        for old in self.texts:
            old.remove()
        self.texts = []
        upright = 90 if self.cell < UPRIGHT_BELOW_INCHES and len(self.panel.rows) <= 4 else 0
        size = style.SMALL_SIZE if len(self.panel.rows) <= 12 else style.LABEL_SIZE - 1.0
        for row, line in enumerate(texts):
            for column, text in enumerate(line):
                if text:
                    ink = style.ink_on(self.scale(self.norm(table[row, column])))
                    look: dict[str, Any] = {"fontsize": size, "color": ink, "rotation": upright}
                    drawn = self.axes.text(column, row, text, ha="center", va="center", **look)
                    self.texts.append(drawn)


# -- animation --------------------------------------------------------------------------------


def spread(frames: Sequence[Frame], limit: int = MAX_FRAMES) -> list[Frame]:
    """Return at most `limit` frames, evenly, the first and the last always among them."""
    picks = np.unique(np.linspace(0, len(frames) - 1, min(limit, len(frames))).round().astype(int))
    return [frames[i] for i in picks]


def animate(spec: FigureSpec, panel: HeatMap) -> list[Image.Image]:
    """Return the frames of a heat map that moves, as images with one palette."""
    with style.applied():
        grid = _Grid(spec, [panel])
        grid.figure.set_dpi(GIF_DPI)
        style.freeze_layout(grid.figure)
        canvas = cast(FigureCanvasAgg, grid.figure.canvas)
        images = []
        for frame in spread(panel.frames):
            grid.maps[0].show(frame.values, frame.texts)
            grid.maps[0].axes.set_title(style.drawable(frame.name), fontsize=style.TEXT_SIZE)
            canvas.draw()
            images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    palette = _palette()
    return [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]


def _palette() -> Image.Image:
    """Return an image whose only purpose is to carry the colours of all frames."""
    scale = matplotlib.colormaps[style.COLOR_SCALE](np.linspace(0, 1, 48))[:, :3]
    greys = np.linspace(0, 1, 16)[:, None].repeat(3, axis=1)
    carrier = Image.new("P", (1, 1))
    carrier.putpalette((np.vstack([greys, scale]) * 255).round().astype(np.uint8).tobytes())
    return carrier


def encode_gif(frames: Sequence[Image.Image]) -> bytes:
    """Return a GIF that repeats for ever, its last frame held; thinned if it would be too large."""
    while len(content := _encode(frames)) > MAX_GIF_BYTES and len(frames) > 2:
        # Counted from the end, so that the final state stays.
        frames = frames[::-2][::-1]
    return content


def _encode(frames: Sequence[Image.Image]) -> bytes:
    file = BytesIO()
    frames[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=frames[1:],
        duration=[FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS],
        loop=0,
        optimize=False,
    )
    return file.getvalue()
