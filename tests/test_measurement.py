"""Figures as commands show them: with their interval, in no more digits than that deserves."""

from pathlib import Path

import pytest

from deepenough.__main__ import main
from deepenough.measurement import figure_lines, intervals_of, share_interval, shown
from deepenough.par.config import ParTrainConfig
from deepenough.par.training import train


@pytest.mark.parametrize(
    ("value", "ends", "said"),
    [
        (0.8125, (0.76, 0.86), "0.81 (0.76 to 0.86)"),
        (0.8125, (0.811, 0.814), "0.812 (0.811 to 0.814)"),
        (0.5, (0.1, 0.9), "0.5 (0.1 to 0.9)"),
        (812.4321, (790.2, 840.9), "812 (790 to 841)"),
        (1234.5678, None, "1,235"),
        (1.0, (1.0, 1.0), "1"),
        (float("inf"), (1.0, float("inf")), "inf"),
        ("valid", None, "valid"),
    ],
)
def test_no_more_digits_than_the_interval_deserves(
    value: object, ends: tuple[float, float] | None, said: str
) -> None:
    assert shown(value, ends) == said


def test_lines_of_figures() -> None:
    few = share_interval(9, 12)
    values = {"exact": 0.75, "loss": 3.14159, "by": [{"nesting": 1, "exact": 0.5}], "programs": 12}
    lines = list(figure_lines(values | intervals_of(exact=few, loss=None)))
    assert lines[0].split() == ["exact", "0.8", "(0.5", "to", "0.9)"]
    assert lines[1].split(maxsplit=2)[:2] == ["loss", "3.1"] and "too little text" in lines[1]
    assert lines[2] == "nesting 1  exact 0.5"
    assert lines[3].split() == ["programs", "12"]
    assert len(lines) == 5 and "95 %" in lines[4]
    assert list(figure_lines({"tokens": 3})) == [f"{'tokens':24}3"]


def test_perplexity_of_a_text_comes_with_its_interval(
    tmp_path: Path, tiny, text_file: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepenough.config import resolve

    run = str(tmp_path / "run")
    train(resolve(ParTrainConfig, overrides=tiny(Path(run), {"model.pattern": "ad"}, steps=2)))
    words = f"par eval {run} --data {text_file} --cache {shared_cache} --batch_size 4"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert " to " in next(line for line in printed.splitlines() if line.startswith("perplexity"))
    assert main(f"{words} --length 90".split()) == 0
    printed = capsys.readouterr().out
    assert "too little text for a confidence interval" in printed
