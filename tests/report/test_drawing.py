"""The matplotlib renderer: what a figure holds is what is drawn, and nothing overlaps."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from deepenough.errors import UserError
from deepenough.figure import (
    Axis,
    Bars,
    Chart,
    Diagram,
    FigureSpec,
    Frame,
    HeatMap,
    Line,
    Panel,
    Point,
    Rule,
    Scatter,
    Span,
    TokenText,
)
from deepenough.report import drawing, style
from deepenough.report.drawing import draw, save

UNIT = Axis("probability", low=0.0, high=1.0)


def spec(*panels: Panel, **options: object) -> FigureSpec:
    return FigureSpec("name", "Title", "Caption.", panels, "a $run$", **options)


def drawn(*panels: Panel, **options: object) -> Figure:
    ((_, figure),) = draw(spec(*panels, **options))
    figure.draw_without_rendering()
    return figure


def heat(rows: int = 3, columns: int = 6, num_frames: int = 0, **options: object) -> HeatMap:
    values = np.linspace(0, 1, rows * columns).reshape(rows, columns)
    texts = [[f"{value:.2f}" for value in row] for row in values]
    frames = [
        Frame(f"step {n}", (values * n / max(1, num_frames - 1)).tolist(), texts)
        for n in range(num_frames)
    ]
    names = [f"row {i}" for i in range(rows)], [str(i) for i in range(columns)]
    return HeatMap(
        *names, values.tolist(), Axis("x"), Axis("y"), UNIT, texts, frames=frames, **options
    )


def chart(**options: object) -> Chart:
    line = Line("one", [1.0, 2.0, 3.0], [0.2, 0.5, 0.9])
    return Chart(Axis("x", whole=True), Axis("y", percent=True), [line], **options)


def nothing_overlaps(figure: Figure) -> None:
    """Numbers on an axis do not touch, and neither a panel nor a legend leaves the figure."""
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    for axes in figure.axes:
        boxes = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()]
        assert all(a.x1 < b.x0 for a, b in pairwise(sorted(boxes, key=lambda b: b.x0)))
        boxes = [t.get_window_extent() for t in axes.get_yticklabels() if t.get_text()]
        assert all(a.y1 < b.y0 for a, b in pairwise(sorted(boxes, key=lambda b: b.y0)))
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 >= -1 and box.y0 >= -1
        assert box.x1 <= figure.bbox.width + 1 and box.y1 <= figure.bbox.height + 1


@pytest.mark.parametrize("columns", [1, 2, 6, 24, 64])
def test_a_heat_map_is_drawn_as_given_and_its_texts_do_not_touch(columns: int) -> None:
    panel = heat(columns=columns)
    figure = drawn(panel)
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.get_images()[0].get_array(), panel.values)
    assert [t.get_text() for t in axes.texts] == [t for row in panel.texts for t in row]
    for row in range(3):
        own = [t.get_window_extent() for t in axes.texts if t.get_position()[1] == row]
        assert all(a.x1 < b.x0 for a, b in pairwise(sorted(own, key=lambda b: b.x0)))
    nothing_overlaps(figure)


@pytest.mark.parametrize("layers", [2, 13, 49])
def test_square_tables_fit_at_any_depth(layers: int) -> None:
    panel = replace(heat(layers, layers, square=True), texts=())
    nothing_overlaps(drawn(panel, replace(panel, title="second")))


def test_only_values_below_the_scale_are_hatched() -> None:
    values = [[1.0, -3.0, 0.5], [None, 1.0, -0.1], [None, None, 1.0]]
    panel = HeatMap(["0", "1", "2"], ["0", "1", "2"], values, Axis("to"), Axis("from"), UNIT)
    hatched = {tuple(p.get_center()) for p in drawn(panel).axes[0].patches if p.get_hatch()}
    assert hatched == {(1.0, 0.0), (2.0, 1.0)}


def test_frames_mark_cells_and_scales_bend() -> None:
    panel = replace(heat(5, 5), framed=[(1, 2)], value=replace(UNIT, scale="angle"))
    figure = drawn(panel, replace(panel, value=replace(UNIT, scale="root")))
    (frame,) = figure.axes[0].patches
    assert frame.get_xy() == pytest.approx((1.54, 0.59))
    angle, root = (axes.get_images()[0].norm for axes in figure.axes if axes.get_xlabel())
    assert float(root(0.25)) == pytest.approx(0.5)
    assert float(angle(0.75)) == pytest.approx(0.5)


def test_lines_bars_rules_and_spans_are_drawn_as_given() -> None:
    bars = Bars("bars", [0.1, None, 0.3], texts=["10", "", "30"], marks=[0.05, None, 0.4])
    lines = Chart(Axis("x"), Axis("y"), [Line("one", [0, 1, 2], [1, 4, 9])], rules=[Rule(2, "two")])
    both = Chart(
        Axis("pass"), Axis("share", percent=True, low=0.0), bars=[bars], categories=["a", "b", "c"],
        mark_name="marks", rules=[Rule(0.5, "stop", vertical=True)],
        spans=[Span(1, 2, "beyond")],
    )  # fmt: skip
    figure = drawn(lines, both)
    left, right = figure.axes
    curve = next(line for line in left.get_lines() if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(curve.get_xydata(), [(0, 1), (1, 4), (2, 9)])
    heights = [patch.get_height() for patch in right.patches if patch.get_height() < 1]
    assert heights == [0.1, 0.3]
    written = [text.get_text() for text in right.texts]
    assert {"10", "30", " beyond"} <= set(written)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == ["bars", "marks", "one", "stop", "two"]
    nothing_overlaps(figure)


def test_many_names_do_not_push_the_legend_out() -> None:
    lines = [Line(f"a rather long name of line {i}", [0, 1], [i, i + 1]) for i in range(9)]
    figure = drawn(Chart(Axis("x"), Axis("y"), lines))
    nothing_overlaps(figure)
    looks = {(str(line.get_color()), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(looks) == 9


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_panels_with_long_titles_do_not_overlap(columns: int) -> None:
    panels = [chart(title=f"{'a long title ' * 6}{i}") for i in range(5)]
    figure = drawn(*panels, columns=columns)
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    for i, box in enumerate(boxes):
        assert box is not None and box.count_overlaps(boxes[i + 1 :]) == 0


@pytest.mark.parametrize("scale", ["linear", "log", "angle"])
def test_scales_of_an_axis(scale: str) -> None:
    line = Line("a", [1, 2, 3], [0.01, 0.5, 1.0])
    figure = drawn(Chart(Axis("x"), Axis("y", scale, low=0.01, high=1.0), [line]))
    axes = figure.axes[0]
    assert axes.get_ylim() == pytest.approx((0.01, 1.0))
    place = axes.transAxes.inverted().transform(axes.transData.transform((1, 0.5)))[1]
    expected = {"linear": 0.495, "log": 0.849, "angle": 0.289}[scale]
    assert place == pytest.approx(expected, abs=0.005)


def test_labels_of_points_are_written_beside_them() -> None:
    line = Line("a", [1, 2, 3], [1, 2, 2.1], labels=["0", "0.1", "0.2"])
    figure = drawn(Chart(Axis("x"), Axis("y"), [line]))
    assert [t.get_text() for t in figure.axes[0].texts] == ["0", "0.1", "0.2"]


# -- scatter ----------------------------------------------------------------------------------


def make_points(num: int) -> list[Point]:
    rng = np.random.default_rng(0)
    points = []
    for i in range(num):
        x, y = rng.uniform(0.4, 1.0), rng.uniform(50, 56)
        group = ("searched", "hand-written", "baseline", "", "$other$")[i % 5]
        ends = {"y_low": y - 0.2, "y_high": y + 0.3, "x_low": x - 0.01, "x_high": x + 0.01}
        points.append(Point(f"model {i}", x, y, group=group, optimal=i < 3, **ends))
    return points


def test_names_touch_neither_each_other_nor_markers_nor_the_edge() -> None:
    points = make_points(14)
    figure = drawn(Scatter(Axis("time"), Axis("perplexity"), points))
    axes = figure.axes[0]
    names = [text for text in axes.texts if text.get_text()]
    assert {text.get_text() for text in names} == {p.name for p in points}
    boxes = [text.get_window_extent() for text in names]
    markers = axes.transData.transform([(p.x, p.y) for p in points])
    window = axes.get_window_extent()
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[i + 1 :]) == 0
        assert box.count_contains(markers) == 0
        assert window.fully_containsx(box.x0) and window.fully_containsx(box.x1)
        assert window.fully_containsy(box.y0) and window.fully_containsy(box.y1)


def test_the_line_is_a_staircase_through_the_optimal_points() -> None:
    points = make_points(8)
    figure = drawn(Scatter(Axis("time"), Axis("perplexity"), points))
    line = figure.axes[0].get_lines()[0]
    best = sorted((p for p in points if p.optimal), key=lambda p: p.x)
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == [p.x for p in best]
    bold = {t.get_text() for t in figure.axes[0].texts if t.get_fontweight() == "bold"}
    assert bold == {p.name for p in best}


# -- files ------------------------------------------------------------------------------------


def test_every_kind_of_panel_becomes_valid_files_the_same_each_time(tmp_path: Path) -> None:
    figures = [
        spec(chart(), heat()),
        replace(spec(Scatter(Axis("x"), Axis("y"), make_points(4))), name="scatter"),
        replace(spec(TokenText(["a", "b"], [1, None], 2, "layers")), name="tokens"),
        replace(spec(Diagram(["attention", "dense"], "ad")), name="diagram"),
        replace(spec(heat(num_frames=3)), name="moving"),
    ]
    first, again = (
        [path for figure in figures for path in save(figure, tmp_path / place)]
        for place in ("one", "two")
    )
    names = ("name", "scatter", "tokens", "diagram", "moving")
    expected = [f"{name}.{ending}" for name in names for ending in ("png", "pdf", "svg")]
    assert [path.name for path in first] == [*expected, "moving.gif"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    for path in first:
        if path.suffix in (".png", ".gif"):
            with Image.open(path) as image:
                image.verify()


def test_alternatives_are_a_picture_each() -> None:
    panels = [replace(chart(), title=key, key=key) for key in ("", "flops")]
    names = [name for name, _ in draw(spec(*panels, choice="cost"))]
    assert names == ["name", "name_flops"]


def test_a_figure_without_panels_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        draw(spec())


def test_drawing_leaves_no_global_state_and_ignores_the_users_settings(tmp_path: Path) -> None:
    figures_before = plt.get_fignums()
    plain = save(spec(chart(title="a $x$ b")), tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "figure.dpi": 20}):
        before = dict(matplotlib.rcParams)
        other = save(spec(chart(title="a $x$ b")), tmp_path / "other")
        assert dict(matplotlib.rcParams) == before
    assert [p.read_bytes() for p in plain] == [p.read_bytes() for p in other]
    assert plt.get_fignums() == figures_before


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Cannot write into"):
        save(spec(chart()), tmp_path / "file" / "a")


# -- animation --------------------------------------------------------------------------------


@pytest.mark.parametrize(("states", "frames"), [(10, 10), (70, 60)])
def test_the_animation_has_a_frame_a_state_up_to_its_limit(
    tmp_path: Path, states: int, frames: int
) -> None:
    path = save(spec(heat(rows=1, columns=2, num_frames=states)), tmp_path, ("gif",))[-1]
    assert path.stat().st_size < 1_500_000
    with Image.open(path) as gif:
        assert gif.n_frames == frames
        assert gif.info["loop"] == 0
        gif.seek(frames - 1)
        assert gif.info["duration"] == drawing.LAST_FRAME_MS > drawing.FRAME_MS


# -- style ------------------------------------------------------------------------------------


def test_ink_is_readable_on_every_colour_of_the_scale() -> None:
    assert style.ink_on("white") == style.ink_on(style.YELLOW) == "#000000"
    assert style.ink_on("black") == style.ink_on("#00204C") == "#FFFFFF"

    def luminance(color: object) -> float:
        rgb = matplotlib.colors.to_rgb(color)
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    scale = matplotlib.colormaps[style.COLOR_SCALE]
    for i in range(101):
        pair = sorted([luminance(scale(i / 100)), luminance(style.ink_on(scale(i / 100)))])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5  # the WCAG's AA


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.35, "0.35"), (999, "999"), (1500, "1.5k"), (12e6, "12M"), (2e9, "2B")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert style.short_number(value) == text
