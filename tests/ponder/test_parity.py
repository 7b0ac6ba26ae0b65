"""The parity experiment: its task, its network against torch's own cell, its training."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.config import resolve, validate
from deepenough.errors import UserError
from deepenough.ponder.parity import (
    ParityConfig,
    ParityDataConfig,
    ParityModel,
    ParityModelConfig,
    ParityTrainConfig,
    parity_batch,
    train_parity,
)
from deepenough.runs import Record, read_records
from tests.ponder.references import parity_ref, ponder_loss_ref


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., ParityTrainConfig]:
    def make(**changes: Any) -> ParityTrainConfig:
        values = {
            "out": str(tmp_path / "run"),
            "dataset.size": 6,
            "dataset.train_nonzero": 3,
            "dataset.bands": 2,
            "dataset.batch_size": 64,
            "dataset.eval_size": 100,
            "model.width": 16,
            "model.max_passes": 5,
            "train.steps": 12,
            "train.warmup": 2,
            "train.log_every": 1,
            "train.valid_every": 6,
            "train.save_every": 4,
        }
        return resolve(ParityTrainConfig, overrides=values | changes)

    return make


def test_it_learns_and_measures_by_difficulty(small: Callable[..., ParityTrainConfig]) -> None:
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


def test_a_finished_run_resumed_says_nothing_twice(small: Callable[..., ParityTrainConfig]) -> None:
    run = train_parity(small())
    before = run.metrics.read_text()
    train_parity(small(resume=True))
    assert run.metrics.read_text() == before


@pytest.mark.parametrize("mechanism", ["ponder", "act", "fixed"])
def test_resumed_equals_uninterrupted(
    small: Callable[..., ParityTrainConfig],
    tmp_path: Path,
    mechanism: str,
    records: Callable[[Path], list[Record]],
    same_records: Callable[[list[Record], list[Record]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"model.mechanism": mechanism}
    whole = train_parity(small(**changes))
    cut = small(**changes, out=str(tmp_path / "cut"))

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
    cut.resume = True
    again = train_parity(cut)
    same_records(records(again.path), records(whole.path))
    resumed = ParityModel.from_pretrained(again.model).state_dict()
    for name, value in ParityModel.from_pretrained(whole.model).state_dict().items():
        torch.testing.assert_close(value, resumed[name], rtol=1e-5, atol=1e-7)


def test_another_task_in_the_folder_is_refused(small: Callable[..., ParityTrainConfig]) -> None:
    train_parity(small())
    with pytest.raises(UserError, match=r"data\.train_nonzero was 3"):
        train_parity(small(**{"resume": True, "dataset.train_nonzero": 6}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.max_passes": 0}, "max_passes"),
        ({"model.halting_target": 1.0}, "model.halting_target"),
        ({"dataset.train_nonzero": 7}, "only 6 entries"),
    ],
)
def test_impossible_settings_leave_no_folder(
    small: Callable[..., ParityTrainConfig], changes: dict[str, Any], said: str
) -> None:
    settings = small(**changes)
    with pytest.raises(UserError, match=said):
        train_parity(settings)
    assert not Path(settings.out).exists()


def test_a_case_worked_by_hand() -> None:
    assert parity_ref([1, 0, -1, 1, 0, 1]) == 1
    assert parity_ref([1, 0, -1, 1, 0, -1]) == 0
    assert parity_ref([0, -1]) == 0


@given(st.integers(1, 12), st.data())
def test_batches_are_what_they_say(size: int, data: st.DataObject) -> None:
    lowest = data.draw(st.integers(1, size))
    highest = data.draw(st.integers(lowest, size))
    seed = data.draw(st.integers(0, 1 << 40))
    vectors, labels = parity_batch(20, size, lowest, highest, seed)
    assert vectors.shape == (20, size)
    assert set(vectors.unique().tolist()) <= {-1.0, 0.0, 1.0}
    nonzero = (vectors != 0).sum(1)
    assert lowest <= int(nonzero.min()) and int(nonzero.max()) <= highest
    assert labels.tolist() == [parity_ref(row) for row in vectors.tolist()]


def test_a_seed_decides_everything() -> None:
    first, again, other = (parity_batch(50, 8, 1, 8, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_all_difficulties_places_and_labels_come_up_evenly() -> None:
    vectors, labels = parity_batch(20_000, 8, 1, 8, seed=0)
    nonzero = (vectors != 0).sum(1)
    assert (nonzero.bincount(minlength=9)[1:] / 20_000).sub(1 / 8).abs().max() < 0.01
    assert (vectors.abs().mean(0) - 4.5 / 8).abs().max() < 0.02
    assert abs(float(labels.float().mean()) - 0.5) < 0.02


def test_bands_cover_all_difficulties() -> None:
    assert ParityDataConfig(size=8, train_nonzero=4, bands=4).ranges() == [
        (1, 2),
        (3, 4),
        (5, 6),
        (7, 8),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"size": 4, "train_nonzero": 5}, "only 4 entries"),
        ({"size": 10, "train_nonzero": 5, "bands": 4}, "must divide"),
    ],
)
def test_impossible_vectors_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate(ParityDataConfig(**changes))


def test_impossible_difficulties_are_refused() -> None:
    with pytest.raises(ValueError, match="4 entries"):
        parity_batch(1, 4, 3, 5, seed=0)


def make(**changes: object) -> ParityModel:
    torch.manual_seed(0)
    model = validate(ParityModelConfig(**({"width": 8, "max_passes": 4} | changes)))  # type: ignore[arg-type]
    return ParityModel(ParityConfig(size=6, **asdict(model)))


def test_the_number_of_ones_and_of_minus_ones_is_all_that_is_read() -> None:
    model = make()
    vectors = torch.tensor([[1.0, -1, 1, 0, 0, 0], [0, 1, 0, 0, -1, 1], [1, -1, 1, 1, 0, 0]])
    logits, halt_logits = model(vectors)
    assert logits.shape == (4, 3, 2) and halt_logits.shape == (3, 4)
    torch.testing.assert_close(logits[:, 0], logits[:, 1])
    assert not torch.allclose(logits[:, 0], logits[:, 2])


def test_the_ponder_loss_equals_the_plain_loop() -> None:
    model = make(halting_target=0.3, kl_weight=0.2)
    vectors, labels = parity_batch(7, 6, 1, 6, seed=2)
    with torch.no_grad():
        logits, halt_logits = model(vectors)
        loss = model.loss(logits, halt_logits, labels)
    expected = ponder_loss_ref(logits, halt_logits.sigmoid(), labels, target=0.3, beta=0.2)
    assert [float(term) for term in loss] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mechanism", ["ponder", "act", "fixed"])
def test_every_mechanism_learns_something(mechanism: str) -> None:
    model = make(mechanism=mechanism, act_cost=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first = last = 0.0
    for step in range(60):
        vectors, labels = parity_batch(64, 6, 1, 1, seed=step)
        loss = model.loss(*model(vectors), labels)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        first, last = first or loss.task.item(), loss.task.item()
    assert last < 0.3 * first
    answers, _ = model.answer(*model(vectors))
    assert torch.equal(answers.argmax(-1), labels)


def test_ponder_answers_with_the_pass_at_which_it_halts() -> None:
    model = make()
    logits = torch.arange(4.0)[:, None, None].expand(4, 3, 2)
    halts = torch.tensor([[0.6, 0.1, 0.1, 0.1], [0.3, 0.3, 0.1, 0.1], [0.01, 0.01, 0.01, 0.01]])
    answers, passes = model.answer(logits, halts.logit())
    assert passes.tolist() == [1, 2, 4]
    assert answers[:, 0].tolist() == [0.0, 1.0, 3.0]


def test_a_new_model_halts_about_as_the_prior_does() -> None:
    halts = make(halting_target=0.3)(torch.zeros(1, 6))[1].sigmoid()
    assert (halts - 0.3).abs().max() < 0.12


def test_fixed_answers_with_the_last_pass() -> None:
    model = make(mechanism="fixed")
    logits, halt_logits = model(parity_batch(3, 6, 1, 6, seed=0)[0])
    answers, passes = model.answer(logits, halt_logits)
    assert passes.tolist() == [4, 4, 4]
    assert torch.equal(answers, logits[-1])


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    model = make(mechanism="act")
    model.save_pretrained(tmp_path)
    loaded = ParityModel.from_pretrained(tmp_path)
    assert loaded.config.mechanism == "act"
    vectors, _ = parity_batch(5, 6, 1, 6, seed=0)
    torch.testing.assert_close(model(vectors), loaded(vectors))


@pytest.mark.parametrize("changes", [{"mechanism": "luck"}, {"max_passes": 0}, {"width": 0}])
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UserError):
        make(**changes)
