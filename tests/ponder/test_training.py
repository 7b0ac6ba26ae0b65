"""Training of classifiers that ponder, from a file of texts to a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.config import resolve
from deepenough.errors import UserError
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.evaluation import load_classifier, predict
from deepenough.ponder.modeling import (
    PonderAlbertForSequenceClassification,
    PonderClassifier,
    PonderEncoderForSequenceClassification,
)
from deepenough.ponder.training import make_classifier, train
from deepenough.runs import Record, read_records

Make = Callable[..., PonderTrainConfig]


@pytest.fixture
def small(tmp_path: Path, reviews: Path, tiny_bert: Path) -> Make:
    def make(**changes: Any) -> PonderTrainConfig:
        values = {
            "out": str(tmp_path / "run"),
            "data": str(reviews),
            "dataset.batch_size": 8,
            "model.encoder": str(tiny_bert),
            "train.lr": 0.003,
            "train.warmup": 2,
            "train.log_every": 5,
            "train.valid_every": 20,
            "train.save_every": 10,
            "epochs": 1.0,
        }
        return resolve(PonderTrainConfig, overrides=values | changes)

    return make


def test_a_run_learns_and_leaves_a_model(trained: Path) -> None:
    records, _ = read_records(trained / "metrics.jsonl")
    last = [record for record in records if record.kind == "valid"][-1]
    assert last.step == 80  # 4 rounds of 20 batches
    assert last.values["accuracy"] > 0.9
    assert 1 <= last.values["passes"] <= 3
    terms = [record.values for record in records if record.kind == "train"][-1]
    assert terms["task"] < 0.5 and terms["kl"] >= 0
    model, tokenizer = load_classifier(str(trained))
    assert isinstance(model, PonderEncoderForSequenceClassification)
    assert model.config.id2label == {0: "0", 1: "1"}
    assert len(tokenizer) == 15


@pytest.mark.parametrize("objective", ["ponder", "weighted"])
def test_resumed_equals_uninterrupted(
    small: Make,
    tmp_path: Path,
    objective: str,
    records: Callable[[Path], list[Record]],
    same_records: Callable[[list[Record], list[Record]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"ponder.objective": objective}
    changes["ponder.exit"] = "quantile" if objective == "ponder" else "patience"
    whole = train(small(**changes))
    cut = small(**changes, out=str(tmp_path / "cut"))

    class Killed(Exception):
        pass

    forward, calls = PonderClassifier.forward, 0

    def stop_at_fourteen(self: PonderClassifier, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 14:
            raise Killed
        return forward(self, *arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(PonderClassifier, "forward", stop_at_fourteen)
        train(cut)
    cut.resume = True
    again = train(cut)
    same_records(records(again.path), records(whole.path))
    first, second = load_classifier(str(whole.path))[0], load_classifier(str(again.path))[0]
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_full_depth_is_the_same_model_with_another_objective(small: Make) -> None:
    run = train(small(**{"ponder.objective": "last", "ponder.exit": "fixed", "epochs": 0.25}))
    model, _ = load_classifier(str(run.path))
    assert not model.has_halting
    records, _ = read_records(run.metrics)
    assert [r.values["passes"] for r in records if r.kind == "valid"] == [3.0]


def test_a_revision_reaches_the_hub(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(name: str, **options: Any) -> Any:
        asked.append((name, options))
        raise UserError("asked")

    monkeypatch.setattr("deepenough.ponder.training.load", stop)
    with pytest.raises(UserError, match="asked"):
        train(small(**{"model.encoder": "owner/name", "model.revision": "v2"}))
    assert asked == [("owner/name", {"kind": "encoder", "revision": "v2"})]


def test_dropout_of_the_encoder_can_be_set(small: Make) -> None:
    settings = small(**{"model.dropout": 0.0})
    model, _ = make_classifier(settings.model, settings.ponder, ["bad", "good"])
    parts = [part for part in model.encoder_model.modules() if isinstance(part, torch.nn.Dropout)]
    assert len(parts) > 3
    assert {part.p for part in parts} == {0.0}


def test_albert_from_a_config_with_a_bare_tokenizer(
    small: Make, tmp_path: Path, data_dir: Path
) -> None:
    if not (data_dir / "tokenizers" / "albert-base-v2").is_dir():
        pytest.skip("DEEPENOUGH_DATA has no tokenizers")
    config = tmp_path / "albert.json"
    values = {"model_type": "albert", "vocab_size": 30000, "embedding_size": 8, "hidden_size": 16}
    values |= {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config.write_text(json.dumps(values))
    changes = {
        "model.encoder": str(config),
        "model.tokenizer": "tokenizers/albert-base-v2",
        "ponder.num_passes": 5,
        "epochs": 0.2,
    }
    run = train(small(**changes))
    model, tokenizer = load_classifier(str(run.path))
    assert isinstance(model, PonderAlbertForSequenceClassification)
    assert model.num_passes == 5
    assert tokenizer.tokenize("deep enough") == ["▁deep", "▁enough"]
    assert next(predict(str(run.path), ["a good film"])).passes <= 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0.0}, "epochs"),
        ({"head_lr": 0.0}, "head_lr"),
        ({"ponder.num_passes": 0}, "num_passes"),
        ({"ponder.num_passes": 4}, "at most 3"),
        ({"ponder.halting_target": 0.0}, "halting_target must be above 0"),
        ({"ponder.exit_threshold": 0.0}, "threshold"),
        ({"ponder.objective": "last"}, "choose confidence, patience or fixed"),
        ({"model.encoder": "/nowhere/config.json"}, "no config file"),
        ({"model.tokenizer": "/nowhere"}, "tokenizer /nowhere cannot be loaded"),
        ({"model.dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_leave_no_folder(
    small: Make, changes: dict[str, Any], said: str
) -> None:
    settings = small(**changes)
    with pytest.raises(UserError, match=said):
        train(settings)
    assert not Path(settings.out).exists()


def test_other_data_in_the_folder_is_refused(small: Make, reviews: Path) -> None:
    train(small(epochs=0.2))
    with pytest.raises(UserError, match=r"data\.train was 160 examples"):
        train(small(**{"epochs": 0.2, "resume": True, "dataset.limit": 100}))


def test_predictions_cut_texts_where_training_did(small: Make, tmp_path: Path) -> None:
    """So that the accuracy that was measured is that of predictions."""
    run = train(small(**{"dataset.max_length": 4}))
    long = "good " * 3
    found = list(predict(str(run.path), [long + "bad " * 20, long + "good " * 20]))
    assert found[0] == found[1]
