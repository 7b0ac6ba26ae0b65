"""Classifiers that ponder, from a file of texts to answers: in small, but end to end."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough.cli.ponder import predict as predict_command
from deepenough.config import resolve
from deepenough.data.classification import ClassificationData, Example, open_classification
from deepenough.data.encoded_examples import EncodedExamples
from deepenough.errors import UserError
from deepenough.ponder import (
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)
from deepenough.ponder.evaluation import (
    ExitSettings,
    PonderEvaluation,
    evaluate,
    load_classifier,
    predict,
)
from deepenough.ponder.measure import all_passes
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.new_model import make_classifier
from deepenough.ponder.policies import ConfidenceExit, FixedExit, PatienceExit, QuantileExit
from deepenough.ponder.training import PonderTraining, train
from deepenough.runs import Record, read_records

Make = Callable[..., PonderTraining]


@pytest.fixture
def small(tmp_path: Path, reviews: Path, tiny_bert: Path) -> Make:
    def make(**changes: Any) -> PonderTraining:
        values = {
            "run.folder": str(tmp_path / "run"),
            "data.dataset": str(reviews),
            "data.batch_size": 8,
            "model.encoder": str(tiny_bert),
            "train.lr": 0.003,
            "train.warmup": 2,
            "train.log_every": 5,
            "train.valid_every": 20,
            "train.save_every": 10,
            "epochs": 1.0,
        }
        return resolve(PonderTraining, overrides=values | changes)

    return make


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, reviews: Path, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    values = {
        "run.folder": str(folder),
        "data.dataset": str(reviews),
        "data.batch_size": 8,
        "model.encoder": str(tiny_bert),
        "ponder.pooling": "mean",
        "ponder.halting_target": 0.4,
        "train.lr": 0.01,
        "train.warmup": 5,
        "train.valid_every": 40,
        "epochs": 4.0,
        "head_lr": 1.0,
    }
    train(resolve(PonderTraining, overrides=values))
    return folder


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


def test_evaluate_writes_the_whole_frontier(trained: Path) -> None:
    values = evaluate(str(trained))
    assert values["split"] == "valid" and values["examples"] == 40
    assert values["accuracy"] > 0.9 and values["seconds"] > 0
    evaluate(str(trained), settings=PonderEvaluation(str(trained), time=False))
    records, _ = read_records(trained / "metrics.jsonl")
    first = [record for record in records if record.values.get("evaluation") == 1]
    again = [record for record in records if record.values.get("evaluation") == 2]
    kinds = [record.kind for record in first]
    assert [record.kind for record in again] == [k for k in kinds if k != "ponder_time"]
    exits = [record.values for record in first if record.kind == "ponder_exit"]
    assert {point["policy"] for point in exits} == {"quantile", "confidence", "patience", "fixed"}
    full = next(p for p in exits if p["policy"] == "fixed" and p["setting"] == 3)
    assert full["passes"] == 3.0 and full["share"] == 1.0
    assert next(p for p in exits if p["policy"] == "quantile" and p["setting"] == 1.0) == {
        **full,
        "policy": "quantile",
        "setting": 1.0,
    }
    tables = {r.values["by"]: r.values for r in first if r.kind == "ponder_passes"}
    for table in tables.values():
        assert sum(map(sum, table["counts"])) == 40
    examples = [record.values for record in first if record.kind == "ponder_example"]
    assert all(abs(sum(example["halting"]) - 1) < 1e-4 for example in examples)


def test_what_is_replayed_is_what_really_stops(trained: Path) -> None:
    """The quality of the sweep is that of inference that leaves the batch."""
    records, _ = read_records(trained / "metrics.jsonl")
    if not any(record.kind == "ponder_time" for record in records):
        evaluate(str(trained))
        records, _ = read_records(trained / "metrics.jsonl")
    timed = {r.values["policy"]: r.values for r in records if r.kind == "ponder_time"}
    exits = [record.values for record in records if record.kind == "ponder_exit"]
    half = next(p for p in exits if p["policy"] == "quantile" and p["setting"] == 0.5)
    assert timed["own exit"]["passes"] == pytest.approx(half["passes"])
    assert timed["own exit"]["accuracy"] == pytest.approx(half["accuracy"])
    assert timed["all passes"]["passes"] == 3.0


def test_predictions_stream(trained: Path) -> None:
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield "a very good film" if asked % 2 else "so awful a plot"

    answers = predict(str(trained), endless(), rows=4)
    found = [next(answers) for _ in range(6)]
    assert [answer["label"] for answer in found] == ["1", "0"] * 3
    assert all(0.5 < answer["probability"] <= 1 and 1 <= answer["passes"] <= 3 for answer in found)
    assert asked < 2000
    fixed = predict(str(trained), ["good"], ExitSettings(exit="fixed", passes=2))
    assert next(fixed)["passes"] == 2


@pytest.mark.parametrize(
    ("exit_", "said"),
    [
        (ExitSettings(threshold=0.0), "threshold"),
        (ExitSettings(threshold=1.5), "threshold"),
        (ExitSettings(exit="fixed", passes=4), "exit_pass"),
        (ExitSettings(exit="patience", patience=0), "patience"),
    ],
)
def test_impossible_exits_are_refused(trained: Path, exit_: ExitSettings, said: str) -> None:
    with pytest.raises(UserError, match=said):
        next(predict(str(trained), ["good"], exit_))


def test_other_examples_and_a_folder_without_a_run(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    rows = [{"text": "very good", "label": 1}, {"text": "very bad", "label": "0"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = evaluate(str(trained / "model"), str(path))
    assert values["examples"] == 2
    path.write_text('{"text": "good", "label": 2}\n')
    with pytest.raises(UserError, match=r"2 in row 1 of more\.jsonl"):
        evaluate(str(trained), str(path))
    with pytest.raises(UserError, match="has no split 'test'"):
        evaluate(str(trained), settings=PonderEvaluation(str(trained), split="test"))
    with pytest.raises(UserError, match="no model"):
        evaluate(str(tmp_path))


@pytest.mark.parametrize("objective", ["ponder", "weighted"])
def test_resumed_equals_uninterrupted(
    small: Make,
    tmp_path: Path,
    objective: str,
    records: Callable[[Path], list[Record]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"ponder.objective": objective}
    changes["ponder.exit"] = "quantile" if objective == "ponder" else "patience"
    whole = train(small(**changes))
    cut = small(**changes, **{"run.folder": str(tmp_path / "cut")})

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
    cut.run.resume = True
    again = train(cut)
    assert records(again.path) == records(whole.path)
    first, second = load_classifier(str(whole.path))[0], load_classifier(str(again.path))[0]
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_full_depth_is_the_same_model_with_another_objective(small: Make) -> None:
    run = train(small(**{"ponder.objective": "last", "ponder.exit": "fixed", "epochs": 0.25}))
    model, _ = load_classifier(str(run.path))
    assert not model.has_halting
    records, _ = read_records(run.metrics)
    assert [r.values["passes"] for r in records if r.kind == "valid"] == [3.0]


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
    assert next(predict(str(run.path), ["a good film"]))["passes"] <= 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0.0}, "epochs"),
        ({"head_lr": 0.0}, "head_lr"),
        ({"ponder.num_passes": 0}, "num_passes"),
        ({"ponder.num_passes": 4}, "at most 3"),
        ({"ponder.halting_target": 0.0}, "halting target"),
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
    assert not Path(settings.run.folder).exists()


def test_other_data_in_the_folder_is_refused(small: Make, reviews: Path) -> None:
    train(small(epochs=0.2))
    with pytest.raises(UserError, match=r"data\.train was 160 examples"):
        train(small(**{"epochs": 0.2, "run.resume": True, "data.limit": 100}))


def test_processes_share_the_measuring(trained: Path) -> None:
    class Share:
        """One of two processes, whose sums with the other are made later."""

        num_processes = 2

        def __init__(self, process_index: int) -> None:
            self.process_index = process_index
            self.parts: list[torch.Tensor] = []

        def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
            assert reduction == "sum"
            self.parts.append(tensor)
            return tensor

    model, tokenizer = load_classifier(str(trained))
    rows = [Example("a very good film " * (1 + n % 5), None, 0) for n in range(130)]
    examples = EncodedExamples(rows, tokenizer, 16)
    alone = all_passes(model, examples)
    shares = [Share(0), Share(1)]
    for share in shares:
        all_passes(model, examples, share)  # type: ignore[arg-type]
    logits, halts = (sum(parts) for parts in zip(*(share.parts for share in shares), strict=True))
    torch.testing.assert_close(logits, alone.step_logits)
    torch.testing.assert_close(halts[:, :-1].logit(), alone.halt_logits)


def test_an_option_names_its_exit(trained: Path) -> None:
    model, _ = load_classifier(str(trained))
    assert isinstance(ExitSettings(passes=1).policy(model), FixedExit)
    assert isinstance(ExitSettings(patience=1).policy(model), PatienceExit)
    assert isinstance(ExitSettings(threshold=0.7).policy(model), QuantileExit)
    assert isinstance(ExitSettings("confidence", 0.7).policy(model), ConfidenceExit)
    with pytest.raises(UserError, match=r"exit\.passes is of use with the exit fixed, not"):
        ExitSettings("confidence", passes=2).policy(model)
    with pytest.raises(UserError, match=r"leave it out, or give --exit\.exit"):
        ExitSettings(patience=1, passes=2).policy(model)


def test_predictions_cut_texts_where_training_did(small: Make, tmp_path: Path) -> None:
    """So that the accuracy that was measured is that of predictions."""
    run = train(small(**{"data.max_length": 4}))
    long = "good " * 3
    found = list(predict(str(run.path), [long + "bad " * 20, long + "good " * 20]))
    assert found[0] == found[1]


def test_a_line_that_is_not_utf8_is_labelled(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"good caf\xe9\r\nbad\n"))
    monkeypatch.setattr("sys.stdin", given)
    assert predict_command.main([str(trained)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_examples_with_secret_labels_or_of_one_class(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\na\t0\nb\t1\n")
    (folder / "dev.tsv").write_text("sentence\tlabel\na\t0\n")
    (folder / "test.tsv").write_text("sentence\tlabel\nc\t-1\n")
    texts = open_classification(ClassificationData(dataset=str(folder)))
    assert set(texts.splits) == {"train", "valid"}
    (folder / "train.tsv").write_text("sentence\tlabel\na\t1\nb\t1\n")
    with pytest.raises(UserError, match="the same label"):
        open_classification(ClassificationData(dataset=str(folder)))
    (tmp_path / "two.csv").write_text("text,label\na,0\nb,1\n")
    with pytest.raises(UserError, match=r"No training example of .* is left"):
        open_classification(
            ClassificationData(dataset=str(tmp_path / "two.csv"), valid_fraction=0.99)
        )


def test_half_a_character_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_text('{"text": "good \\ud83d", "label": 0}\n{"text": "bad", "label": 1}\n')
    texts = open_classification(ClassificationData(dataset=str(file), valid_fraction=0.0))
    assert texts.split("train")[0].text == "good ?"
