"""The Pareto line against its definition, points as they were given, labels apart."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deepenough.errors import UserError
from deepenough.report import draw_frontier, pareto, plot_frontier
from deepenough.report.frontier import Point, read_point

# Few distinct values, so that ties and equal points come up often.
COORDINATE = st.integers(0, 6).map(float)


def pareto_ref(xy: list[tuple[float, float]], sign: float) -> set[int]:
    """The definition: nobody is as good in both and better in one."""

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and sign * a[1] <= sign * b[1] and a != b

    return {i for i, p in enumerate(xy) if not any(beats(q, p) for q in xy)}


@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12), st.booleans())
def test_pareto_equals_its_definition(xy: list[tuple[float, float]], higher: bool) -> None:
    found = pareto(xy, higher_is_better=higher)
    assert set(found) == pareto_ref(xy, -1.0 if higher else 1.0)
    assert len(found) == len(set(found))
    assert [xy[i][0] for i in found] == sorted(xy[i][0] for i in found)


def test_seeds_become_a_mean_with_its_spread() -> None:
    row = {"name": "n", "pattern": "ad", "t": [1.0, 3.0], "ppl": [50.0, 52.0, 51.0], "group": "g"}
    assert read_point(row, "t", "ppl") == Point("n", 2.0, 51.0, 50.0, 52.0, "ad", "g")
    row |= {"ppl": 51.0, "ppl_low": 49.0, "ppl_high": 53.0}
    assert read_point(row, "t", "ppl") == Point("n", 2.0, 51.0, 49.0, 53.0, "ad", "g")


@pytest.mark.parametrize("value", [None, "fast", float("nan"), [], [1.0, None]])
def test_a_point_without_a_number_is_an_error(tmp_path: Path, value: object) -> None:
    with pytest.raises(UserError, match="'odd'"):
        plot_frontier([{"name": "odd", "x": 1.0, "y": value}], tmp_path / "f", x="x", y="y")


def test_no_point_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no point"):
        plot_frontier([], tmp_path / "f")


def make_points(num: int) -> list[Point]:
    rng = np.random.default_rng(0)
    points = []
    for i in range(num):
        x, y = rng.uniform(0.4, 1.0), rng.uniform(50, 56)
        group = ("searched", "hand-written", "baseline", "", "$other$")[i % 5]
        points.append(Point(f"model {i}", x, y, y - 0.2, y + 0.3, "aadadd", group))
    return points


def test_labels_touch_neither_each_other_nor_markers_nor_the_edge() -> None:
    points = make_points(14)
    figure = draw_frontier(points, x_label="time", y_label="perplexity")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    names = {text.get_text().splitlines()[0] for text in axes.texts}
    assert names == {point.name for point in points}
    # Not the extent of the annotation: that includes the line that ties it to its point.
    boxes = [super(type(t), t).get_window_extent() for t in axes.texts]
    markers = axes.transData.transform([(p.x, p.y) for p in points])
    window = axes.get_window_extent()
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[i + 1 :]) == 0
        assert box.count_contains(markers) == 0
        assert window.fully_containsx(box.x0)
        assert window.fully_containsx(box.x1)
        assert window.fully_containsy(box.y0)
        assert window.fully_containsy(box.y1)


def test_the_line_is_a_staircase_through_the_optimal_points() -> None:
    points = make_points(8)
    figure = draw_frontier(points, x_label="time", y_label="perplexity")
    line = figure.axes[0].get_lines()[0]
    best = pareto([(p.x, p.y) for p in points])
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == [points[i].x for i in best]
    bold = [
        t.get_text().splitlines()[0] for t in figure.axes[0].texts if t.get_fontweight() == "bold"
    ]
    assert sorted(bold) == sorted(points[i].name for i in best)


def test_files_are_written_and_the_same_each_time(tmp_path: Path) -> None:
    rows = [
        {
            "name": f"m{i}",
            "pattern": "ad",
            "relative_time": 1 - i / 9,
            "perplexity": [50.0 + i, 51 + i],
        }
        for i in range(4)
    ]
    first = plot_frontier(rows, tmp_path / "new" / "frontier", title="Title")
    again = plot_frontier(rows, tmp_path / "again", title="Title")
    assert [path.name for path in first] == ["frontier.png", "frontier.pdf"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    with Image.open(first[0]) as image:
        image.verify()


def test_one_point_and_equal_points_can_be_drawn(tmp_path: Path) -> None:
    row = {"name": "a name " * 30, "relative_time": 1.0, "perplexity": 50.0}
    assert plot_frontier([row], tmp_path / "one")
    assert plot_frontier([row] * 5, tmp_path / "five")
