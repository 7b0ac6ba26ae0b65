"""Training of classifiers that ponder, from a file of texts to a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.config import resolve
from deepenough.errors import UserError
from deepenough.ponder.config import PonderEvalConfig, PonderTrainConfig
from deepenough.ponder.evaluation import evaluate, load_classifier, predict
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
    run = train(small(**{"ponder.objective": "last", "epochs": 0.25}))
    model, _ = load_classifier(str(run.path))
    assert not model.has_halting
    records, _ = read_records(run.metrics)
    assert [r.values["passes"] for r in records if r.kind == "valid"] == [3.0]


def test_the_exit_is_chosen_on_the_validation_split_and_saved(
    small: Make, tmp_path: Path, reviews: Path
) -> None:
    """Never on the test split, whose labels may be anything; the test record is of that exit."""
    chosen = []
    for name in ("right", "wrong"):
        folder = tmp_path / name
        shutil.copytree(reviews, folder)
        rows = [line.split("\t") for line in (folder / "dev.tsv").read_text().splitlines()]
        for row in rows[1:] if name == "wrong" else []:
            row[1] = str(1 - int(row[1]))
        (folder / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
        run = train(small(data=str(folder), out=str(tmp_path / f"run-{name}"), epochs=3.0))
        config = load_classifier(str(run.path))[0].config
        assert config.exit == "quantile" and "on 40 validation examples" in config.exit_reason
        chosen.append((config.exit_threshold, config.exit_reason))
        records, _ = read_records(run.metrics)
        of_test = next(record.values for record in records if record.kind == "test")
        measured = evaluate(PonderEvalConfig(str(run.path), split="test"))
        assert measured["exit"] == f"quantile at {config.exit_threshold}"
        assert of_test["accuracy"] == measured["accuracy"]
        assert of_test["passes"] == measured["passes"]
        points = [r.values for r in read_records(run.metrics)[0] if r.kind == "ponder_exit"]
        best = max(point["accuracy"] for point in points if point["policy"] == "quantile")
        assert name == "wrong" or measured["accuracy"] == best
    assert chosen[0] == chosen[1]


def test_an_exit_that_is_asked_for_is_kept(small: Make) -> None:
    run = train(small(**{"ponder.exit_threshold": 0.5, "epochs": 0.25}))
    config = load_classifier(str(run.path))[0].config
    assert (config.exit, config.exit_threshold) == (None, 0.5)
    assert not hasattr(config, "exit_reason")
    assert evaluate(PonderEvalConfig(str(run.path)))["exit"] == "quantile at 0.5"


@pytest.mark.parametrize(
    ("objective", "exits"),
    [("weighted", {"confidence", "patience", "fixed"}), ("last", {"fixed"})],
)
def test_every_objective_has_an_exit_that_fits_it(small: Make, objective: str, exits: Any) -> None:
    run = train(small(**{"ponder.objective": objective, "epochs": 0.5}))
    config = load_classifier(str(run.path))[0].config
    assert config.exit in exits
    measured = evaluate(PonderEvalConfig(str(run.path)))
    if objective == "last":
        assert measured["passes"] == 3.0 and measured["exit"] == "fixed at all passes"
        assert config.exit_reason == "as only the last answer is trained"


def test_a_run_resumed_at_its_end_chooses_the_same_exit(small: Make) -> None:
    run = train(small(epochs=0.5))
    first = (run.model / "config.json").read_text()
    shutil.rmtree(run.model)
    assert (train(small(epochs=0.5, resume=True)).model / "config.json").read_text() == first


def test_a_revision_reaches_the_hub(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(name: str, **options: Any) -> Any:
        asked.append((name, options))
        raise UserError("asked")

    monkeypatch.setattr("deepenough.ponder.training.load", stop)
    with pytest.raises(UserError, match="asked"):
        train(small(**{"model.encoder": "owner/name", "model.revision": "v2"}))
    assert asked == [
        ("owner/name", {"kind": "encoder", "revision": "v2", "trust_remote_code": None})
    ]


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
        (
            {"ponder.objective": "last", "ponder.exit": "quantile"},
            "choose confidence, patience or fixed",
        ),
        ({"model.encoder": "/nowhere/config.json"}, "no config file"),
        ({"model.tokenizer": "/nowhere"}, "tokenizer of '/nowhere' was not found"),
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


def test_settings_that_would_be_ignored_are_refused(
    small: Make, tiny_bert: Path, tmp_path: Path
) -> None:
    train(small(epochs=0.2))
    again = {"epochs": 0.2, "resume": True}
    with pytest.raises(UserError, match=r"another ponder\.exit_threshold, because the training"):
        train(small(**again, **{"ponder.exit_threshold": 0.9}))
    other = shutil.copytree(tiny_bert, tmp_path / "other")
    with pytest.raises(UserError, match=r"another model\.encoder, because the weights are"):
        train(small(**again | {"model.encoder": str(other), "epochs": 0.4}))
    same = tiny_bert / ".." / tiny_bert.name
    train(small(**again | {"model.encoder": str(same), "epochs": 0.4}))


def test_predictions_cut_texts_where_training_did(small: Make, tmp_path: Path) -> None:
    """So that the accuracy that was measured is that of predictions."""
    run = train(small(**{"dataset.max_length": 4}))
    long = "good " * 3
    found = list(predict(str(run.path), [long + "bad " * 20, long + "good " * 20]))
    assert found[0] == found[1]


def test_a_budget_chooses_on_held_out_examples(small: Make, tmp_path: Path) -> None:
    run = train(small(**{"ponder.exit_budget": 0.67, "epochs": 2.0}))
    model, _ = load_classifier(str(run.path))
    assert "within the budget" in model.config.exit_reason and model.config.exit_budget is None
    assert evaluate(PonderEvalConfig(str(run.path)))["share"] <= 0.67
    lines = tmp_path / "lone.csv"
    lines.write_text("text,label\na good film,1\na bad film,0\n")
    changes = {"ponder.exit_budget": 0.67, "data": str(lines), "out": str(tmp_path / "none")}
    with pytest.raises(UserError, match="chooses the exit on validation examples, and there are"):
        train(small(**changes, **{"dataset.valid_fraction": 0.0}))
