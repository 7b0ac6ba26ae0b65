"""Reading a run folder: what is broken is left out and said, what is not there is not there."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepenough.errors import UserError
from deepenough.report import read_run, read_runs
from deepenough.report.source import Run, block_states, last_value, number, series
from deepenough.runs import Record, RunFolder


def test_corrupted_lines_are_skipped_counted_and_said(make_run: Callable[..., Path]) -> None:
    path = make_run(num_steps=100)
    whole = read_run(path)
    assert whole.notes == ()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('not json\n{"kind": "train"}\n{"step": 110, "kind": "tra')
    damaged = read_run(path)
    assert damaged.records == whole.records
    assert len(damaged.notes) == 1
    assert "3 unreadable line" in damaged.notes[0]


@pytest.mark.parametrize("content", ["a: [", "- a list", "\x00"])
def test_an_unreadable_config_is_said(make_run: Callable[..., Path], content: str) -> None:
    path = make_run(num_steps=100)
    (path / "config.yaml").write_text(content)
    run = read_run(path)
    assert run.config == {}
    assert "config.yaml" in run.notes[0]


def test_a_diverged_loss_is_said_and_left_out(make_run: Callable[..., Path]) -> None:
    path = make_run(num_steps=100)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(Record(110, "train", {"loss": math.nan}).to_json() + "\n")
    run = read_run(path)
    assert "1 loss" in run.notes[0]
    assert series(run, "train", "loss")[0].max() == 100


@pytest.mark.parametrize("content", [None, "", "garbage\n"])
def test_a_run_without_a_record_is_an_error(tmp_path: Path, content: str | None) -> None:
    folder = RunFolder.create(tmp_path / "empty")
    folder.config.write_text("{}")
    if content is not None:
        folder.metrics.write_text(content)
    with pytest.raises(UserError, match="no record"):
        read_run(folder.path)


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            read_run(path)


def test_runs_of_one_name_are_told_apart(make_run: Callable[..., Path]) -> None:
    paths = [make_run(f"{parent}/same", num_steps=100) for parent in ("left", "right")]
    assert [run.name for run in read_runs(paths)] == ["left/same", "right/same"]
    assert [run.name for run in read_runs(paths[:1])] == ["same"]


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1]])
def test_what_is_no_finite_number(value: object) -> None:
    assert number(value) is None


def test_series_sorts_and_lets_the_later_record_stand() -> None:
    losses = [(20, 2.0), (10, 3.0), (20, 1.5)]
    run = Run("r", [Record(step, "train", {"loss": loss}, 0.0) for step, loss in losses])
    steps, values = series(run, "train", "loss")
    assert steps.tolist() == [10, 20]
    assert values.tolist() == [3.0, 1.5]
    assert last_value(run, "loss") == 1.5
    assert last_value(run, "lr") is None


def test_only_distributions_count_as_block_states() -> None:
    good = [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    bad = [
        None, 3, [], [[]], "pi", [[0.5, 0.5]], [0.2, 0.3, 0.5], [[0.2, 0.3, 0.6]], [[-1, 1, 1]],
        [[math.nan, 0, 1]], [[0.2, 0.3, "x"]], [[1, 0, 0], [1, 0]],
    ]  # fmt: skip
    records = [Record(i, "train", {"pi": pi}, 0.0) for i, pi in enumerate(bad)]
    assert block_states(Run("r", records)) == []
    # Another number of blocks than at the end belongs to another model.
    records += [Record(50, "train", {"pi": [[1.0, 0.0, 0.0]]}, 0.0)]
    records += [Record(60, "train", {"pi": good, "tau": 0.5}, 0.0)]
    records += [Record(60, "derive", {"pi": good, "pattern": "-a"}, 0.0)]
    (state,) = block_states(Run("r", records))
    assert state.step == 60
    assert state.tau == 0.5  # the record of the derivation has none, that of the step has
    assert state.pattern == "-a"
    np.testing.assert_array_equal(state.pi, good)
