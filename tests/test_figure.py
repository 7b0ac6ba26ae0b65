"""Reading a run folder: what is broken is left out and said, what is not there is not there."""

import math
from pathlib import Path

import pytest

from deepenough.errors import UserError
from deepenough.figure import (
    Run,
    distinct_names,
    last_value,
    number,
    read_run,
    readable,
    series,
    share,
    shortened,
    visible,
)
from deepenough.runs import Metrics, Record, RunFolder


@pytest.fixture
def make_run(tmp_path: Path):
    """Return a function that writes a run of ten records and returns its folder."""

    def make(name: str = "first") -> Path:
        folder = RunFolder.create(tmp_path / name)
        folder.config.write_text("method: par\n")
        metrics = Metrics(folder.metrics)
        for step in range(10, 101, 10):
            metrics.append(Record(step, "train", {"loss": 5.0 - step / 50}))
        return folder.path

    return make


def test_corrupted_lines_are_skipped_counted_and_said(make_run) -> None:
    path = make_run()
    whole = read_run(path)
    assert whole.notes == ()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('not json\n{"kind": "train"}\n{"step": 110, "kind": "tra')
    damaged = read_run(path)
    assert damaged.records == whole.records
    assert len(damaged.notes) == 1
    assert "3 unreadable line" in damaged.notes[0]


@pytest.mark.parametrize("content", ["a: [", "\x00"])
def test_an_unreadable_config_is_said(make_run, content: str) -> None:
    path = make_run()
    (path / "config.yaml").write_text(content)
    run = read_run(path)
    assert run.config == {}
    assert "config.yaml" in run.notes[0]


def test_a_diverged_loss_is_said_and_left_out(make_run) -> None:
    path = make_run()
    with open(path / "metrics.jsonl", "a") as file:
        file.write(Record(110, "train", {"loss": math.nan}).to_json() + "\n")
    run = read_run(path)
    assert "1 loss" in run.notes[0]
    assert max(series(run, "train", "loss")[0]) == 100


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


def test_runs_of_one_name_are_told_apart(make_run) -> None:
    paths = [make_run(f"{parent}/same") for parent in ("left", "right")]
    assert distinct_names(paths) == ["left/same", "right/same"]
    assert distinct_names(paths[:1]) == ["same"]


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1]])
def test_what_is_no_finite_number(value: object) -> None:
    assert number(value) is None


def test_a_share_may_leave_its_range_by_rounding() -> None:
    assert [share(v) for v in (0.5, 1 + 1e-6, -1e-6, 1.1, -0.1)] == [0.5, 1.0, 0.0, None, None]


def test_series_sorts_and_lets_the_later_record_stand() -> None:
    losses = [(20, 2.0), (10, 3.0), (20, 1.5)]
    run = Run("r", [Record(step, "train", {"loss": loss}, 0.0) for step, loss in losses])
    steps, values = series(run, "train", "loss")
    assert steps == [10, 20]
    assert values == [3.0, 1.5]
    assert last_value(run, "loss") == 1.5
    assert last_value(run, "lr") is None


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "␣the"), ("\n", "↵"), ("\t", "⇥"), ("", "∅"), ("\x00", "\\x00"),
        ("\x1b[0m", "\\x1b[0m"), ("\u202e", "\\u202e"), ("\u200b", "\\u200b"),
        ("\ud800", "\\ud800"), ("\u0301", "◌\u0301"), ("中文", "中文"), ("naïve", "naïve"),
    ],
)  # fmt: skip
def test_every_character_of_a_token_can_be_seen(token: str, shown: str) -> None:
    assert visible(token) == shown


def test_a_space_in_running_text_stays_a_space() -> None:
    assert [readable(token) for token in (" the", " ", "a\tb")] == [" the", "␣", "a⇥b"]


def test_long_texts_lose_their_middle() -> None:
    assert shortened("plain-name_1") == "plain-name_1"
    assert shortened("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert shortened("two\n lines") == "two lines"
    assert len(shortened("x" * 1000)) == 40
