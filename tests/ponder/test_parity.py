"""The parity experiment in small: it learns, resumes exactly and measures by difficulty."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.config import resolve
from deepenough.errors import UserError
from deepenough.ponder.parity import ParityTraining, train_parity
from deepenough.ponder.parity_model import ParityModel
from deepenough.runs import Record, read_records


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., ParityTraining]:
    def make(**changes: Any) -> ParityTraining:
        values = {
            "run.folder": str(tmp_path / "run"),
            "data.size": 6,
            "data.train_nonzero": 3,
            "data.bands": 2,
            "data.batch_size": 64,
            "data.eval_size": 100,
            "model.width": 16,
            "model.max_passes": 5,
            "train.steps": 12,
            "train.warmup": 2,
            "train.log_every": 1,
            "train.valid_every": 6,
            "train.save_every": 4,
        }
        return resolve(ParityTraining, overrides=values | changes)

    return make


def test_it_learns_and_measures_by_difficulty(small: Callable[..., ParityTraining]) -> None:
    settings = small(**{"train.steps": 200, "train.lr": 0.03, "train.valid_every": 200})
    run = train_parity(settings)
    records, _ = read_records(run.metrics)
    last = [record for record in records if record.kind == "valid"][-1].values
    assert last["accuracy"] > 0.95
    bands = [record.values for record in records if record.kind == "parity"]
    assert [(band["lowest"], band["highest"], band["beyond"]) for band in bands] == [
        (1, 3, False),
        (4, 6, True),
    ]
    assert all(1 <= band["passes"] <= 10 for band in bands)
    assert ParityModel.from_pretrained(run.model).config.mechanism == "ponder"


def test_a_finished_run_resumed_says_nothing_twice(small: Callable[..., ParityTraining]) -> None:
    run = train_parity(small())
    before = run.metrics.read_text()
    train_parity(small(**{"run.resume": True}))
    assert run.metrics.read_text() == before


@pytest.mark.parametrize("mechanism", ["ponder", "act", "fixed"])
def test_resumed_equals_uninterrupted(
    small: Callable[..., ParityTraining],
    tmp_path: Path,
    mechanism: str,
    records: Callable[[Path], list[Record]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"model.mechanism": mechanism}
    whole = train_parity(small(**changes))
    cut = small(**changes, **{"run.folder": str(tmp_path / "cut")})

    class Killed(Exception):
        pass

    forward, calls = ParityModel.loss, 0

    def stop_at_seven(self: ParityModel, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Killed
        return forward(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ParityModel, "loss", stop_at_seven)
        train_parity(cut)
    cut.run.resume = True
    again = train_parity(cut)
    assert records(again.path) == records(whole.path)
    for name, value in ParityModel.from_pretrained(whole.model).state_dict().items():
        assert torch.equal(value, ParityModel.from_pretrained(again.model).state_dict()[name])


def test_another_task_in_the_folder_is_refused(small: Callable[..., ParityTraining]) -> None:
    train_parity(small())
    with pytest.raises(UserError, match=r"data\.train_nonzero was 3"):
        train_parity(small(**{"run.resume": True, "data.train_nonzero": 6}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.eval_passes": 0}, "eval_passes"),
        ({"model.halting_target": 1.0}, "halting target"),
        ({"data.train_nonzero": 7}, "only 6 entries"),
    ],
)
def test_impossible_settings_leave_no_folder(
    small: Callable[..., ParityTraining], changes: dict[str, Any], said: str
) -> None:
    settings = small(**changes)
    with pytest.raises(UserError, match=said):
        train_parity(settings)
    assert not Path(settings.run.folder).exists()
