"""The matplotlib renderer: a `FigureSpec` as PNG, PDF, SVG and, where it moves, GIF.

Panels share one picture, in rows of `spec.columns`, with one legend below them; panels that are
alternatives (`spec.choice`) are a picture each. Figures are bare `Figure` objects, never pyplot's,
so nothing is left behind. The same data give the same bytes: the files carry no date.
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from deepenough import figure as fig
from deepenough.artifacts import atomic_path, write_text
from deepenough.errors import UserError
from deepenough.report import charts, pictures, style

FORMATS = ("png", "pdf", "svg", "gif")
_NO_DATE = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
SCREEN_DPI = 150
GIF_DPI = 100
MAX_FRAMES = 60
FRAME_MS = 120
LAST_FRAME_MS = 2500


def save_figures(figures: Sequence[fig.FigureSpec], folder: Path | str) -> list[Path]:
    """Draw figures into `folder`, each beside its data as NAME.data.json, and return the files."""
    written: list[Path] = []
    for figure in figures:
        written += save(figure, folder)
        data = Path(folder) / f"{figure.name}.data.json"
        with fig.writing(data.parent):
            write_text(data, json.dumps(fig.as_json(figure)) + "\n")
        written.append(data)
    return written


def save(spec: fig.FigureSpec, folder: Path | str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a figure into `folder` and return the files written."""
    written = []
    with style.applied(), fig.writing(Path(folder)):
        for name, figure in draw(spec):
            for ending in (ending for ending in formats if ending != "gif"):
                file = Path(folder) / f"{name}.{ending}"
                about = cast("dict[str, Any] | None", _NO_DATE[ending])
                with atomic_path(file) as partial:
                    figure.savefig(partial, format=ending, metadata=about)
                written.append(file)
        for panel in spec.panels if "gif" in formats else ():
            if isinstance(panel, fig.HeatMap) and len(panel.frames) > 1:
                file = Path(folder) / f"{spec.name}.gif"
                with atomic_path(file) as partial:
                    save_gif(animate(spec, panel), partial)
                written.append(file)
    return written


def draw(spec: fig.FigureSpec) -> list[tuple[str, Figure]]:
    """Return the pictures of a figure, each with its file name without the ending."""
    if not spec.panels:
        raise UserError(f"The figure {spec.title!r} has nothing to draw.")
    with style.applied():
        if not spec.choice:
            return [(spec.name, _draw_panels(spec, spec.panels))]
        return [
            (f"{spec.name}_{panel.key}" if panel.key else spec.name, _draw_panels(spec, [panel]))
            for panel in spec.panels
        ]


def _draw_panels(spec: fig.FigureSpec, panels: Sequence[fig.Panel]) -> Figure:
    panels = [
        pictures.lens_map(p) if isinstance(p, fig.TokenText) and p.lens else p for p in panels
    ]
    columns = min(spec.columns, len(panels))
    sizes = [_size(panel, columns) for panel in panels]
    widths = [max(width for width, _ in sizes[i::columns]) for i in range(columns)]
    starts = range(0, len(panels), columns)
    heights = [max(height for _, height in sizes[i : i + columns]) for i in starts]
    # The resolution of the file: labels are placed by the size that texts have there.
    figure = Figure((max(sum(widths), 5.0), sum(heights) + 0.45), SCREEN_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        len(heights), columns, width_ratios=widths, height_ratios=heights
    ).subplots(squeeze=False)
    drawn: list[tuple[Axes, fig.Panel]] = list(zip(grid.flat, panels, strict=False))
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    names = _names(panels)
    for i, (axes, panel) in enumerate(drawn):
        _draw_panel(axes, panel, names, widths[i % columns])
    _add_legend(figure, panels)
    heading = " · ".join(filter(None, (spec.title, fig.shortened(spec.subject, 60))))
    heading = style.drawable(fig.shortened(heading, int(figure.get_figwidth() * 10)))
    figure.suptitle(heading, x=0.01, ha="left", fontsize=style.TITLE_SIZE)
    # From here on the layout stays: labels are placed in it.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, panel in drawn:
        charts.place_labels(axes, panel)
    return figure


def _size(panel: fig.Panel, columns: int) -> tuple[float, float]:
    """Return the inches that a panel wants."""
    if isinstance(panel, fig.HeatMap):
        return pictures.heat_size(panel)
    if isinstance(panel, fig.Diagram):
        return pictures.diagram_size(panel)
    if isinstance(panel, fig.TokenText):
        return pictures.tokens_size(panel)
    return charts.chart_size(panel, columns)


def _draw_panel(axes: Axes, panel: fig.Panel, names: Sequence[str], width: float) -> None:
    if panel.title:
        lines = textwrap.wrap(style.drawable(panel.title), max(20, int(width * 12.5)))[:3]
        axes.set_title("\n".join(lines), fontsize=style.TEXT_SIZE)
    if isinstance(panel, fig.Chart):
        charts.draw_chart(axes, panel, names, width)
    elif isinstance(panel, fig.Scatter):
        charts.draw_scatter(axes, panel, names)
    elif isinstance(panel, fig.HeatMap):
        pictures.draw_heat(axes, panel)
        pictures.add_scale(axes, axes.images[0], panel.value)
    elif isinstance(panel, fig.TokenText):
        pictures.draw_tokens(axes, panel)
    else:
        pictures.draw_diagram(axes, panel)


def _names(panels: Sequence[fig.Panel]) -> list[str]:
    """Return the names that have colours, in the order in which they first come up."""
    found: list[str] = []
    for panel in panels:
        if isinstance(panel, fig.Chart):
            found += [line.name for line in panel.lines]
            found += [bars.name for bars in panel.bars]
        elif isinstance(panel, fig.Scatter):
            found += [point.group for point in panel.points]
    return list(dict.fromkeys(found))


def _add_legend(figure: Figure, panels: Sequence[fig.Panel]) -> None:
    """Add what tells the names apart below the panels; nothing for a single one."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(text, handle)
    for panel in panels:
        found.pop(style.label(panel.title), None)  # a panel of its own needs no entry
    if len(found) < 2:
        return
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (0.7 + 0.075 * max(map(len, found)))))
    figure.set_size_inches(width, height + 0.22 * -(-len(found) // columns))
    figure.legend(found.values(), found, loc="outside lower center", ncols=min(columns, len(found)))


def animate(spec: fig.FigureSpec, panel: fig.HeatMap) -> list[Image.Image]:
    """Return pictures of a heat map that moves, `MAX_FRAMES` at most."""
    with style.applied():
        figure = _draw_panels(spec, [panel])
        figure.set_dpi(GIF_DPI)
        axes, canvas = figure.axes[0], cast(FigureCanvasAgg, figure.canvas)
        images = []
        for frame in fig.thin(panel.frames, MAX_FRAMES):
            pictures.fill_cells(axes, frame.values, frame.texts)
            axes.set_title(style.drawable(frame.name), fontsize=style.TEXT_SIZE)
            canvas.draw()
            images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    return images


def save_gif(frames: Sequence[Image.Image], file: Path) -> None:
    """Write a GIF that repeats for ever, its last frame held.

    One palette without dithering keeps colours from flickering, and the file small.
    """
    greys = np.linspace(0, 1, 16)[:, None].repeat(3, axis=1)
    shades = matplotlib.colormaps[style.COLOR_SCALE](np.linspace(0, 1, 48))[:, :3]
    palette = Image.new("P", (1, 1))
    palette.putpalette((np.vstack([greys, shades]) * 255).round().astype(np.uint8).tobytes())
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [FRAME_MS] * (len(images) - 1) + [LAST_FRAME_MS]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=times, loop=0)
