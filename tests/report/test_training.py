"""The curves: what is drawn is what was recorded, and only that."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from deepenough.report import read_run, read_runs, write_comparison
from deepenough.report.source import Run
from deepenough.report.training import draw_training, line_look, smooth
from deepenough.runs import Record


def titles(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_a_search_has_all_panels(make_run: Callable[..., Path]) -> None:
    figure = draw_training([read_run(make_run())])
    assert [t.split()[0] for t in titles(figure)] == [
        "loss", "perplexity", "temperature", "learning", "entropy",
    ]  # fmt: skip
    assert figure is not None
    assert figure.axes[1].get_yscale() == "log"


def test_panels_without_data_are_left_out(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run(search=False))
    assert len(titles(draw_training([run]))) == 3
    only_lr = Run("r", [Record(i, "train", {"lr": 0.1}, 0.0) for i in range(3)])
    assert titles(draw_training([only_lr])) == ["learning rate"]
    assert draw_training([Run("r", [Record(1, "cost", {"attention": 1e-3}, 0.0)])]) is None


def test_train_perplexity_is_the_exponential_of_the_smoothed_loss(
    make_run: Callable[..., Path],
) -> None:
    figure = draw_training([read_run(make_run())])
    assert figure is not None
    loss, perplexity = (axes.get_lines()[1] for axes in figure.axes[:2])
    np.testing.assert_allclose(np.exp(loss.get_ydata()), perplexity.get_ydata())


def test_a_flat_perplexity_has_a_linear_scale_and_a_huge_loss_does_no_harm() -> None:
    records = [Record(i, "train", {"loss": 3.0 + i / 100}, 0.0) for i in range(20)]
    figure = draw_training([Run("r", records)])
    assert figure is not None
    assert figure.axes[1].get_yscale() == "linear"
    figure = draw_training([Run("r", [*records, Record(20, "valid", {"loss": 1e300}, 0.0)])])
    assert figure is not None
    figure.draw_without_rendering()


def test_a_perplexity_alone_is_enough() -> None:
    figure = draw_training([Run("r", [Record(1, "test", {"perplexity": np.e}, 0.0)])])
    assert figure is not None
    points = [line.get_ydata()[0] for line in figure.axes[0].get_lines() if len(line.get_ydata())]
    assert points == [1.0]


def test_several_runs_share_the_panels_with_a_legend(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    names = ["_first", "a $x$ b", "x" * 200]
    runs = read_runs([make_run(name, num_steps=200, seed=i) for i, name in enumerate(names)])
    figure = draw_training(runs)
    assert figure is not None
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [t.split(" (")[0] for t in texts[:2]] == names[:2]
    assert len(texts[2]) < 60
    assert texts[3:] == ["train (smoothed)", "valid", "test"]
    assert [path.name for path in write_comparison(runs, tmp_path)] == [
        "training.png", "training.pdf",
    ]  # fmt: skip


def test_as_many_runs_as_a_legend_can_hold_look_different() -> None:
    looks = [tuple(line_look(i).values()) for i in range(28)]
    assert len(set(looks)) == 28


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
