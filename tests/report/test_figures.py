"""Training curves and comparisons as figures: what was recorded, and only that."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepenough.errors import UserError
from deepenough.figure import Run, read_run
from deepenough.report.drawing import save_figures
from deepenough.report.figures import (
    compared_curves,
    frontier_figure,
    frontier_section,
    read_frontier,
    run_figures,
    sample_figure,
    smooth,
    training_figure,
)
from deepenough.runs import Record


def titles(*runs: Run) -> list[str]:
    figure = training_figure(*runs)
    assert figure is not None
    return [panel.title for panel in figure.panels]


def test_a_search_has_all_panels(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run())
    assert [title.split()[0] for title in titles(run)] == [
        "loss", "perplexity", "temperature", "learning", "entropy",
    ]  # fmt: skip
    figure = training_figure(run)
    assert figure is not None
    loss, perplexity = figure.panels[:2]
    assert [line.name for line in loss.lines] == [
        "train (each record)", "train (smoothed)", "valid", "test",
    ]  # fmt: skip
    assert perplexity.y.scale == "log"
    # The perplexity of the training is that of the smoothed loss.
    assert perplexity.lines[1].y == pytest.approx(np.exp(loss.lines[1].y).tolist())


def test_panels_without_data_are_left_out(make_run: Callable[..., Path]) -> None:
    assert len(titles(read_run(make_run(search=False)))) == 3
    only_lr = Run("r", [Record(i, "train", {"lr": 0.1}, 0.0) for i in range(3)])
    assert titles(only_lr) == ["learning rate"]
    assert training_figure(Run("r", [Record(1, "cost", {"attention": 1e-3}, 0.0)])) is None


def test_a_loss_that_is_no_language_models_has_no_perplexity() -> None:
    records = [Record(i, "train", {"loss": 3.0, "accuracy": 0.5}, 0.0) for i in range(5)]
    assert titles(Run("r", records)) == ["loss"]


def test_a_flat_perplexity_has_a_linear_scale_and_a_huge_loss_does_no_harm() -> None:
    records = [
        Record(i, "train", {"loss": 3.0 + i / 100, "perplexity": 20.0}, 0.0) for i in range(20)
    ]
    records.append(Record(20, "valid", {"loss": 1e300}, 0.0))
    figure = training_figure(Run("r", records))
    assert figure is not None
    assert figure.panels[1].y.scale == "linear"
    names = [line.name for line in figure.panels[1].lines]
    assert names == ["train (each record)", "train (smoothed)"]


def test_several_runs_share_the_panels(make_run: Callable[..., Path], tmp_path: Path) -> None:
    names = ["_first", "a $x$ b", "x" * 200]
    runs = [read_run(make_run(name, num_steps=200, seed=i)) for i, name in enumerate(names)]
    (figure,) = compared_curves(runs)
    lines = figure.panels[0].lines
    assert [line.name for line in lines[:3]] == ["_first", "_first, valid", "a $x$ b"]
    assert len(lines[4].name) < 60
    assert [line.color for line in lines] == [0, 0, 1, 1, 2, 2]
    written = save_figures([figure], tmp_path)
    assert [path.name for path in written] == [
        "training.png", "training.pdf", "training.svg", "training.data.json",
    ]  # fmt: skip


def test_smoothing_keeps_a_line_and_takes_noise_away() -> None:
    steps = np.arange(0.0, 1000.0, 10.0)
    line = 5.0 - 0.002 * steps
    np.testing.assert_allclose(smooth(steps, line, 5), line)
    noise = np.random.default_rng(0).normal(0, 0.1, len(steps))
    smoothed = smooth(steps, line + noise, 5)
    assert np.abs(smoothed - line).mean() < 0.5 * np.abs(noise).mean()
    assert abs(smoothed[-1] - line[-1]) < 0.2


def test_smoothing_survives_steps_far_apart() -> None:
    steps = np.array([*range(40), 10**12], dtype=float)
    values = np.linspace(5, 3, len(steps))
    smoothed = smooth(steps, values, 2)
    assert np.isfinite(smoothed).all()
    assert np.abs(smoothed - values).max() < 0.5


@pytest.mark.parametrize("num", [0, 1, 2])
def test_smoothing_leaves_few_points_alone(num: int) -> None:
    values = np.arange(num, dtype=float)
    np.testing.assert_array_equal(smooth(values, values, 3), values)


def test_smoothing_equals_a_fit_per_window() -> None:
    rng = np.random.default_rng(1)
    steps, values = np.cumsum(rng.uniform(1, 9, 40)), rng.normal(size=40)
    fits = []
    for i in range(40):
        window = slice(max(0, i - 4), i + 5)
        fits.append(np.polyval(np.polyfit(steps[window], values[window], 1), steps[i]))
    np.testing.assert_allclose(smooth(steps, values, 4), fits, atol=1e-9)


# -- all figures of a run ---------------------------------------------------------------------


def test_a_run_has_the_figures_of_its_records(folders: list[Path]) -> None:
    names = [[figure.name for figure in run_figures(read_run(path))] for path in folders[1:]]
    assert names == [
        ["blocks", "architecture", "training"],
        ["decided", "layers", "early_exit", "r2", "lens"],
        ["ponder_frontier", "passes", "parity"],
        ["lazy_tokens", "lazy_sentence"],
    ]


def test_pictures_stand_beside_their_data(folders: list[Path], tmp_path: Path) -> None:
    written = save_figures(run_figures(read_run(folders[4])), tmp_path / "new" / "plots")
    assert {path.suffix for path in written} == {".png", ".pdf", ".svg", ".json"}
    data = json.loads((tmp_path / "new" / "plots" / "lazy_tokens.data.json").read_text())
    assert data["panels"][0]["values"] == [[0.4, 0.1], [0.3, 0.0]]


# -- comparisons ------------------------------------------------------------------------------


def test_a_comparison_has_a_panel_a_cost(folders: list[Path], evil: str) -> None:
    frontier = read_frontier(folders[0])
    figure = frontier_figure(frontier)
    assert [panel.key for panel in figure.panels] == ["milliseconds", "layers", "flops"]
    flops = figure.panels[2]
    assert [(p.name, p.x, p.y) for p in flops.points] == [
        ("all", 6.0, 0.95), ("early", 3.0, 0.94), ("worse", 5.0, 0.7),
    ]  # fmt: skip
    assert [p.optimal for p in flops.points] == [True, True, False]
    assert flops.points[0].command == f"run all {evil}"
    assert figure.panels[0].points[0].x_low == pytest.approx(5.8)
    assert figure.command == "deepenough compare 'runs/my own' --out=runs/both"
    sample = sample_figure(frontier)
    assert sample is not None and list(sample.panels[0].depth) == [None, 2, 6]


def test_the_choice_is_said_in_plain_words(folders: list[Path]) -> None:
    frontier = read_frontier(folders[0])
    (choice,) = frontier_section(frontier).findings
    assert choice == (
        "Best agreement: 0.95 with “all”. “early” is not significantly worse (agreement 0.94) and "
        "2.0 (1.4 to 2.8) times as fast, with 3.0 instead of 6.0 blocks per token."
    )
    closer = [replace(point, relative_time_low=0.1) for point in frontier.points]
    (choice,) = frontier_section(replace(frontier, points=closer)).findings
    assert choice.endswith("No other setting of the same quality is significantly faster.")
    alike = [replace(point, layers=6.0) for point in frontier.points]
    (choice,) = frontier_section(replace(frontier, points=alike)).findings
    assert choice.endswith("2.0 (1.4 to 2.8) times as fast.")
    apart = [frontier.points[0], *(replace(p, quality_high=0.9) for p in frontier.points[1:])]
    (choice,) = frontier_section(replace(frontier, points=apart)).findings
    assert choice.endswith("No other setting of the same quality is significantly faster.")
    (choice,) = frontier_section(replace(frontier, points=frontier.points[::-1])).findings
    assert "0.8 (0.6 to 1.2) times as fast as “worse”" in choice
    same = [replace(point, quality=1.0, quality_high=1.0) for point in frontier.points]
    (choice,) = frontier_section(replace(frontier, points=same)).findings
    said = "All tokens identical with “early”, 2.0 (1.4 to 2.8) times as fast as “all”."
    assert choice.startswith(said)


@pytest.mark.parametrize("content", ["{", "[]", '{"task": {}}', '{"task": {}, "points": [{}]}'])
def test_a_damaged_comparison_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "frontier.json").write_text(content)
    with pytest.raises(UserError, match=r"frontier\.json"):
        read_frontier(tmp_path)
