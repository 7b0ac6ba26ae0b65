"""The heat map and its animation show what was recorded."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from deepenough.report import animation, read_run, save
from deepenough.report.animation import animate_blocks, spread
from deepenough.report.blocks import draw_blocks
from deepenough.report.source import block_states


def cells(figure: Figure) -> dict[int, tuple[int, str]]:
    """Block -> (row, text) of the values written into the heat map."""
    found = {}
    for text in figure.axes[0].texts:
        block, row = text.get_position()
        found[int(block)] = (int(row), text.get_text())
    return found


@pytest.mark.parametrize("pattern", ["aadad-", "a", "ad-" * 20])
def test_the_leading_value_of_every_block_is_written_in(
    make_run: Callable[..., Path], pattern: str
) -> None:
    run = read_run(make_run(pattern=pattern, num_steps=100))
    figure = draw_blocks(run)
    assert figure is not None
    pi = block_states(run)[-1].pi
    written = cells(figure)
    assert len(written) == len(pi) == len(pattern)
    for block, row in enumerate(pi):
        assert written[block] == (int(row.argmax()), f"{row.max():.2f}")
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array(), pi.T)


def test_the_values_do_not_touch(make_run: Callable[..., Path]) -> None:
    for pattern in ("aadad-", "ad" * 16, "aad-" * 20):
        figure = draw_blocks(read_run(make_run(pattern, pattern=pattern, num_steps=100)))
        assert figure is not None
        figure.draw_without_rendering()
        boxes = sorted((t.get_window_extent() for t in figure.axes[0].texts), key=lambda b: b.x0)
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


@pytest.mark.parametrize("pattern", ["a", "aadad-", "ad" * 16])
def test_the_title_stays_inside_the_figure(make_run: Callable[..., Path], pattern: str) -> None:
    figure = draw_blocks(read_run(make_run("n" * 100, pattern=pattern, num_steps=100)))
    assert figure is not None
    figure.draw_without_rendering()
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith("nnn")
    assert f"step 100 · τ 0.10 · leading {pattern}" in title
    box = figure.axes[0].get_tightbbox()
    assert box is not None
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_a_run_without_a_search_has_neither(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run(search=False, num_steps=100))
    assert draw_blocks(run) is None
    assert animate_blocks(run) is None


@pytest.mark.parametrize(("num_steps", "frames"), [(100, 10), (1000, 60)])
def test_the_animation_has_a_frame_a_state_up_to_its_limit(
    make_run: Callable[..., Path], tmp_path: Path, num_steps: int, frames: int
) -> None:
    moving = animate_blocks(read_run(make_run(num_steps=num_steps)))
    assert moving is not None
    (path,) = moving.save(tmp_path / "blocks")
    assert path.stat().st_size < 1_500_000
    with Image.open(path) as gif:
        assert gif.n_frames == frames
        assert gif.info["loop"] == 0
        gif.seek(frames - 1)
        assert gif.info["duration"] == animation.LAST_FRAME_MS > animation.FRAME_MS


def test_a_large_animation_is_thinned_and_keeps_its_end(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = animate_blocks(read_run(make_run(num_steps=80)))
    assert moving is not None
    (path,) = moving.save(tmp_path / "whole")
    monkeypatch.setattr(animation, "MAX_BYTES", path.stat().st_size * 2 // 3)
    (thin,) = moving.save(tmp_path / "thin")
    assert thin.stat().st_size <= animation.MAX_BYTES
    with Image.open(thin) as gif:
        assert gif.n_frames == 4
        gif.seek(3)
        assert gif.convert("RGB").tobytes() == moving.frames[-1].convert("RGB").tobytes()


def test_one_state_is_no_animation(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run(num_steps=10, every=10))
    assert draw_blocks(run) is not None
    assert animate_blocks(run) is None


def test_frames_are_spread_evenly_with_both_ends(make_run: Callable[..., Path]) -> None:
    states = block_states(read_run(make_run(num_steps=1000, every=10)))
    steps = [s.step for s in spread(states, 7)]
    assert len(steps) == 7
    assert (steps[0], steps[-1]) == (10, 1000)
    assert np.ptp(np.diff(steps)) <= 10
    assert spread(states, 1000) == states


def test_the_same_run_gives_the_same_bytes(make_run: Callable[..., Path], tmp_path: Path) -> None:
    path = make_run(num_steps=30)
    contents = []
    for name in ("one", "two"):
        run = read_run(path)
        figure, moving = draw_blocks(run), animate_blocks(run)
        assert figure is not None
        assert moving is not None
        files = save(figure, tmp_path / name) + moving.save(tmp_path / name)
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
