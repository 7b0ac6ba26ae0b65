"""The drawing has one shape a block, in order, and says only what is known."""

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from deepenough.errors import UserError
from deepenough.report import Run, draw_architecture, read_run
from deepenough.report.architecture import MAX_PER_ROW, arrange, draw_derived, parse_pattern
from deepenough.runs import Record


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_block_is_drawn_in_its_shape() -> None:
    figure = draw_architecture("aadad-", num_parameters=4_210_688, relative_cost=0.654)
    patches = figure.axes[0].patches
    assert sum(type(p) is FancyBboxPatch for p in patches) == 3
    assert sum(type(p) is Rectangle for p in patches) == 2
    written = texts(figure)
    assert "aadad-" in written
    assert "3 attention · 2 dense · 1 identity · 4.211M parameters · relative cost 0.65" in written
    labels = [t for t in written if t in ("attention", "dense", "identity")]
    assert labels == ["attention", "attention", "dense", "attention", "dense", "identity"]
    assert [t for t in written if t.isdigit()] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("num_blocks", [1, 2, 11, 12, 13, 24, 25, 100])
def test_rows_hold_all_blocks_in_order(num_blocks: int) -> None:
    rows = arrange(parse_pattern("a" * num_blocks))
    numbers = [stage.number for row in rows for stage in row]
    assert numbers == [None, None, *range(1, num_blocks + 1), None, None]
    assert all(sum(s.number is not None for s in row) <= MAX_PER_ROW for row in rows)
    assert len(rows) == -(-num_blocks // MAX_PER_ROW)


@pytest.mark.parametrize("pattern", ["-", "-a-", "d" * 12 + "-" + "a" * 11 + "-"])
def test_everything_stays_inside_the_figure_and_no_text_overlaps(pattern: str) -> None:
    figure = draw_architecture(pattern, title="x" * 40, num_parameters=1e9, relative_cost=1)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    width, height = figure.bbox.width, figure.bbox.height
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[i + 1 :]) == 0


@pytest.mark.parametrize(
    ("pattern", "message"), [("", "empty"), ("aaxd", "'x'"), ("a d", "' '"), ("AD", "'A'")]
)
def test_bad_patterns_are_one_sentence(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        draw_architecture(pattern)


def test_a_run_shows_what_it_derived(make_run: Callable[..., Path]) -> None:
    figure = draw_derived(read_run(make_run(num_steps=100)))
    assert figure is not None
    assert "first · derived · aadad-" in texts(figure)
    assert any("4.211M parameters · relative cost 0.65" in text for text in texts(figure))


def test_before_the_derivation_it_shows_what_leads(make_run: Callable[..., Path]) -> None:
    figure = draw_derived(read_run(make_run(num_steps=2000, derived=False)))
    assert figure is not None
    assert "first · leading at step 2,000 · aadad-" in texts(figure)


@pytest.mark.parametrize("config", [{"model": {"pattern": "adad"}}, {"pattern": "adad"}])
def test_a_training_shows_the_pattern_it_was_given(config: dict[str, object]) -> None:
    run = Run("given", [Record(1, "train", {"loss": 1.0}, 0.0)], config)
    figure = draw_derived(run)
    assert figure is not None
    assert "given · adad" in texts(figure)


@pytest.mark.parametrize("pattern", [None, "", 7, "a?d"])
def test_a_run_without_a_pattern_has_no_drawing(pattern: object) -> None:
    record = Record(1, "derive", {"pattern": pattern}, 0.0)
    assert draw_derived(Run("r", [record], {"model": {"pattern": pattern}})) is None
