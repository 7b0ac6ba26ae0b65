"""All pictures of a run: valid files with the names that are promised."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from deepenough.errors import UserError
from deepenough.report import Run, read_run, write_comparison, write_figures
from deepenough.runs import Record


def test_a_search_leaves_every_picture(make_run: Callable[..., Path], tmp_path: Path) -> None:
    written = write_figures(read_run(make_run(num_steps=200)), tmp_path / "new" / "plots")
    drawn = ("blocks", "training", "architecture")
    names = [f"{name}.{kind}" for name in drawn for kind in ("png", "pdf")]
    assert [path.name for path in written] == [*names, "blocks.gif"]
    for path in written:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-")
        else:
            with Image.open(path) as image:
                image.verify()


def test_a_training_leaves_what_it_has(make_run: Callable[..., Path], tmp_path: Path) -> None:
    written = write_figures(read_run(make_run(search=False, num_steps=100)), tmp_path)
    assert {path.name for path in written} == {"training.png", "training.pdf"}


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    run = Run("bare", [Record(1, "cost", {"attention": 1e-3}, 0.0)])
    with pytest.raises(UserError, match="bare"):
        write_figures(run, tmp_path)
    with pytest.raises(UserError, match="compare"):
        write_comparison([run, run], tmp_path)
