"""Records reach metrics.jsonl and TensorBoard; a resumed run hides what it repeats."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepenough.runs import RunFolder, read_records
from deepenough.training.logging import Meter, Recorder

VALUES: dict[str, Any] = {"loss": 2.5, "lr": 1e-3, "tau": 0.5, "pi": [[0.5, 0.3, 0.2]], "name": "x"}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_what_was_recorded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with closing(Recorder(run, enabled=True)) as recorder:
        recorder.begin(0)
        recorder.record(1, "train", VALUES)
        recorder.record(2, "train", VALUES | {"loss": 2.0})
        recorder.record(2, "valid", {"loss": 3.0})
    found = scalars(run.events)
    assert found["train/loss"] == [(1, 2.5), (2, 2.0)]
    assert found["valid/loss"] == [(2, 3.0)]
    assert found["train/tau"] == [(1, 0.5), (2, 0.5)]
    assert found["train/lr"][0] == (1, pytest.approx(1e-3))
    assert not {"train/name", "train/pi"} & found.keys()


def test_a_resumed_run_says_nothing_twice(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for first, steps in ((0, range(1, 6)), (3, range(4, 9))):
        with closing(Recorder(run, enabled=True)) as recorder:
            recorder.begin(first)
            for step in steps:
                recorder.record(step, "train", {"loss": float(first)})
    expected = [0.0] * 3 + [3.0] * 5
    assert scalars(run.events)["train/loss"] == list(enumerate(expected, start=1))
    records, _ = read_records(run.metrics)
    assert [record.values["loss"] for record in records] == expected
    assert [record.step for record in records] == list(range(1, 9))


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with closing(Recorder(RunFolder(tmp_path), enabled=False)) as recorder:
        recorder.begin(0)
        recorder.record(1, "train", VALUES)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_on_disk_at_once(tmp_path: Path) -> None:
    """A kill takes nothing with it: the file is read while it is still open."""
    run = RunFolder(tmp_path)
    with closing(Recorder(run, enabled=True)) as recorder:
        recorder.begin(0)
        recorder.record(1, "train", VALUES)
        assert scalars(run.events)["train/loss"] == [(1, 2.5)]
        assert len(read_records(run.metrics)[0]) == 1


def test_the_meter_by_hand() -> None:
    meter = Meter()
    meter.add(1.0, 100, 0.5)
    meter.add(2.0, 300, 0.5)
    values = meter.take()
    assert values["loss"] == 1.5
    assert values["perplexity"] == pytest.approx(4.4816890703)
    assert values["tokens_per_second"] == 400.0
    meter.add(5.0, 1, 1.0)
    assert meter.take()["loss"] == 5.0


def test_a_huge_loss_has_an_infinite_perplexity() -> None:
    meter = Meter()
    meter.add(1e4, 1, 1.0)
    assert meter.take()["perplexity"] == float("inf")
