"""Several labels of a text, values, and GLUE's metrics: loss, exits, training, answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from transformers import BertForSequenceClassification

from deepenough.__main__ import main
from deepenough.config import resolve
from deepenough.data.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from deepenough.errors import UserError
from deepenough.measurement import ComparedData
from deepenough.ponder.config import PonderEvalConfig, PonderGrid, PonderTrainConfig
from deepenough.ponder.evaluation import (
    AllPasses,
    evaluate,
    measure,
    open_candidate,
    predict,
    score_interval,
    sweep,
)
from deepenough.ponder.halting import (
    ConfidenceExit,
    PatienceExit,
    QuantileExit,
    answer_loss,
    fixed_loss,
)
from deepenough.ponder.inference import replay
from deepenough.ponder.modeling import PonderEncoderForSequenceClassification
from deepenough.ponder.training import train

PROBLEMS = {MULTI_LABEL: 3, REGRESSION: 1}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_are_those_of_transformers(make_encoder, make_batch, problem: str) -> None:
    """A model of one pass is a plain classifier with the same weights."""
    num_labels = PROBLEMS[problem]
    base = make_encoder("bert", num_hidden_layers=1)
    config = base.config
    config.num_labels, config.problem_type = num_labels, problem
    plain = BertForSequenceClassification(config).eval()
    plain.bert.load_state_dict(base.state_dict())
    model = PonderEncoderForSequenceClassification.from_encoder(
        base, num_labels=num_labels, problem_type=problem, exit="fixed"
    ).eval()
    head = model.classifiers[0]
    head.dense.load_state_dict(plain.bert.pooler.dense.state_dict())
    head.out.load_state_dict(plain.classifier.state_dict())
    batch = make_batch(rows=4)
    shape = (4, num_labels) if problem == MULTI_LABEL else (4,)
    labels = torch.rand(shape) if problem == REGRESSION else torch.randint(2, shape).float()
    expected = plain(**batch, labels=labels)
    for whole in (False, True):
        found = model(**batch, labels=labels.tolist(), all_passes=whole)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss)


def test_early_passes_learn_what_the_last_one_says() -> None:
    steps, weights = torch.randn(2, 4, 3), torch.tensor([1.0, 0.0])
    labels = torch.randint(2, (4, 3)).float()
    loss = fixed_loss(steps, weights, labels, MULTI_LABEL, distill=1.0).task
    torch.testing.assert_close(loss, answer_loss(steps[0], steps[1].sigmoid(), MULTI_LABEL))
    values = steps[..., :1]
    loss = fixed_loss(values, weights, labels[:, 0], REGRESSION, distill=1.0).task
    torch.testing.assert_close(loss, (values[0] - values[1]).square().mean())


@pytest.mark.parametrize(
    "problem, labels, reason",
    [
        (MULTI_LABEL, [[0, 1, 2]] * 9, "The label of example 0 is 2, and the model answers with 0"),
        (MULTI_LABEL, [1] * 9, "9 examples need 3 numbers each"),
        (REGRESSION, [0.0] * 8 + [float("nan")], "The label of example 8 is nan"),
    ],
)
def test_labels_that_do_not_fit_are_refused(make_model, batch, problem, labels, reason) -> None:
    model = make_model(num_labels=PROBLEMS[problem], problem_type=problem)
    with pytest.raises(UserError, match=reason):
        model(**batch, labels=labels)


def test_exits_read_what_the_answers_are() -> None:
    values = torch.tensor([3.0, 1.0, 1.1, 1.25, 9.0]).view(5, 1, 1)
    for patience, tolerance, expected in ((1, 0.2, 3), (2, 0.2, 4), (1, 0.05, 5), (1, 5.0, 2)):
        policy = PatienceExit(patience, tolerance)
        assert replay(policy, values, None, problem=REGRESSION).tolist() == [expected]
    # Two labels: the first set changes once, and its second label is unsure until pass 3.
    sets = torch.tensor([[2.0, 0.1], [2.0, -0.2], [2.0, -3.0], [2.0, -3.0]]).view(4, 1, 2)
    assert replay(PatienceExit(1), sets, None, problem=MULTI_LABEL).tolist() == [3]
    assert replay(ConfidenceExit(0.8), sets, None, problem=MULTI_LABEL).tolist() == [3]
    assert replay(ConfidenceExit(0.8), sets, None, problem=SINGLE_LABEL).tolist() == [1]


def test_a_value_is_never_sure(make_model, batch) -> None:
    model = make_model(num_labels=1)
    assert model.problem == REGRESSION  # as in transformers
    with pytest.raises(UserError, match="this model answers with values: use QuantileExit"):
        model(**batch, policy=ConfidenceExit(0.9))
    answers = AllPasses(torch.randn(3, 5, 1), None, torch.randn(5), REGRESSION, ("pearson",))
    assert {point["policy"] for point in sweep(answers)} == {"patience", "fixed"}


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_those_of_the_libraries(seed: int) -> None:
    random = np.random.default_rng(seed)
    given, wanted = random.integers(2, size=(2, 30))
    values, truth = random.normal(size=30).round(1), random.normal(size=30).round(1)
    several, right = random.integers(2, size=(2, 30, 4))

    def found(name: str, a: Any, b: Any) -> float:
        return measure(name, torch.tensor(a), torch.tensor(b))

    assert found("accuracy", given, wanted) == pytest.approx((given == wanted).mean())
    assert found("f1", given, wanted) == pytest.approx(metrics.f1_score(wanted, given))
    expected = metrics.matthews_corrcoef(wanted, given)
    assert found("matthews", given, wanted) == pytest.approx(expected)
    assert found("pearson", values, truth) == pytest.approx(stats.pearsonr(values, truth)[0])
    assert found("spearman", values, truth) == pytest.approx(stats.spearmanr(values, truth)[0])
    expected = metrics.f1_score(right, several, average="micro")
    assert found("f1", several, right) == pytest.approx(expected)
    expected = metrics.accuracy_score(right, several)
    assert found("accuracy", several, right) == pytest.approx(expected)
    interval = score_interval("pearson", torch.tensor(values), torch.tensor(truth))
    assert interval.low <= interval.value <= interval.high < 1
    assert found("matthews", np.zeros(30), wanted) == 0.0  # as scikit-learn has it


def write_table(folder: Path, problem: str) -> Path:
    folder.mkdir()
    rows = []
    for n in range(60):
        words = [
            ("good", "bad")[n % 2],
            ("warm", "dull")[n // 2 % 2],
            ("film", "story")[n // 4 % 2],
        ]
        if problem == MULTI_LABEL:
            label = ",".join(word for word in words if word in ("good", "warm", "film"))
        else:
            label = f"{2.0 * (n % 2) + n // 2 % 2:.1f}"
        rows.append((" ".join(words), label))
    for split, part in (("train", rows[:40]), ("dev", rows[40:])):
        lines = [f"{text}\t{label}" for text, label in part]
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "problem, kind", [(MULTI_LABEL, "roberta"), (REGRESSION, "deberta"), (REGRESSION, "albert")]
)
def test_a_run_from_the_file_to_the_comparison(
    tmp_path: Path, make_encoder, tokenizer, capsys, problem: str, kind: str
) -> None:
    data, base, run = tmp_path / "data", tmp_path / "base", tmp_path / "run"
    write_table(data, problem)
    encoder = make_encoder(kind)
    encoder.save_pretrained(base)
    tokenizer.save_pretrained(base)
    values = {
        "out": str(run),
        "data": str(data),
        "dataset.problem_type": problem,
        "dataset.batch_size": 8,
        "model.encoder": str(base),
        "model.dropout": 0.0,
        "ponder.pooling": "mean",
        "ponder.distill": 0.5,
        "train.lr": 0.01,
        "epochs": 8.0,
        "head_lr": 1.0,
    }
    train(resolve(PonderTrainConfig, overrides=values))
    scores = ("f1", "accuracy") if problem == MULTI_LABEL else ("pearson", "spearman")
    found = evaluate(PonderEvalConfig(str(run)))
    assert found[scores[0]] > 0.5 and scores[1] in found and "loss" in found
    assert set(found["intervals"]) == set(scores)
    answers = list(predict(str(run), ["good warm film", "bad dull story"]))
    if problem == MULTI_LABEL:
        assert all(set(answer.label) <= {"good", "warm", "film"} for answer in answers)
        assert all(0.5 <= answer.probability <= 1 for answer in answers)
    else:
        assert all(isinstance(answer.label, float) for answer in answers)
        assert [answer.probability for answer in answers] == [None, None]
    lines = tmp_path / "lines.txt"
    lines.write_text("good warm film\n")
    capsys.readouterr()
    assert main(["ponder", "predict", str(run), str(lines)]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == pytest.approx(answers[0].label)
    candidate = open_candidate(str(run), "own", ComparedData(limit=16, grid=PonderGrid()))
    assert candidate.task.quality == scores[0]
    kinds = {next(iter(point.settings)) for point in candidate.points()}
    assert ("confidence" in kinds) == (problem == MULTI_LABEL)
    point = candidate.points()[0]
    assert candidate.judge(point, candidate.run(point)).quality.value <= 1
    assert main(["ponder", "plot", str(run), "--out", str(tmp_path / "figures")]) == 0


def test_quantile_thresholds_do_not_care_what_answers_are(make_model, batch) -> None:
    for problem, num_labels in PROBLEMS.items():
        model = make_model(num_labels=num_labels, problem_type=problem)
        whole = model(**batch, all_passes=True, policy=QuantileExit(0.5))
        part = model(**batch, policy=QuantileExit(0.5))
        assert part.passes.tolist() == whole.passes.tolist()
        torch.testing.assert_close(part.logits, whole.logits)
