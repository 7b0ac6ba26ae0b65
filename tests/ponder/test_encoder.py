"""PonderEncoder: any encoder's own layers, its checkpoints, and what is no encoder."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5EncoderModel,
)

from deepenough import UserError
from deepenough.hf.adapter import adapt
from deepenough.ponder import PonderEncoderConfig, PonderEncoderForSequenceClassification

ARCHITECTURES = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "albert")


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_encoder_folders_load_and_models_round_trip(make_encoder, batch, tmp_path, kind):
    encoder = make_encoder(kind)
    encoder.save_pretrained(tmp_path / "encoder")
    model = PonderEncoderForSequenceClassification.from_pretrained(
        tmp_path / "encoder", num_labels=4, exit_threshold=0.6
    )
    assert not model.training and model.config.exit_threshold == 0.6
    assert torch.equal(adapt(model.trunk).states(**batch)[-1], adapt(encoder).states(**batch)[-1])
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert type(loaded.config.encoder) is type(encoder.config)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert loaded(**batch).logits.shape == (9, 4)


def test_options_change_a_saved_model(make_model, batch, tmp_path):
    make_model().save_pretrained(tmp_path)
    loaded = PonderEncoderForSequenceClassification.from_pretrained(
        tmp_path, exit="fixed", exit_pass=3
    )
    assert loaded(**batch).passes.tolist() == [3] * 9
    assert loaded.config.num_labels == 3


def test_names_of_labels_are_kept(tmp_path):
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        id2label={0: "bad", 1: "so", 2: "good"},
        hidden_dropout_prob=0.3,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    load = PonderEncoderForSequenceClassification.from_pretrained
    assert load(tmp_path).config.id2label == {0: "bad", 1: "so", 2: "good"}
    renamed = load(tmp_path, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    assert renamed.config.num_labels == 2
    assert load(tmp_path, num_labels=5).config.num_labels == 5
    changed = load(tmp_path, hidden_dropout_prob=0.0, classifier_dropout=0.25)
    assert changed.config.encoder.hidden_dropout_prob == 0.0
    assert changed.classifiers[0].dropout.p == 0.25


def test_fewer_passes_than_layers(make_model, batch):
    model = make_model(num_passes=2)
    assert model(**batch, all_passes=True).step_logits.shape == (2, 9, 3)
    assert model(**batch).trace.ran.shape == (9, 2)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_pooling(make_model, batch, pooling):
    model = make_model(pooling=pooling)
    hidden = adapt(model.trunk).states(**batch)[2]
    mask = batch["attention_mask"]
    rows = [row[:length].mean(0) for row, length in zip(hidden, mask.sum(1), strict=True)]
    expected = hidden[:, 0] if pooling == "cls" else torch.stack(rows)
    torch.testing.assert_close(model.summary(hidden, mask), expected)
    unmasked = model.summary(hidden, None)
    torch.testing.assert_close(unmasked, model.summary(hidden, torch.ones_like(mask)))


@torch.no_grad()
def test_pre_norm_encoders_are_read_behind_their_norm(make_model, batch):
    model = make_model("modernbert")
    states = adapt(model.trunk).states(**batch)
    first = model.trunk.final_norm(states[1])[:, 0]
    expected = model.classifiers[0](first)
    torch.testing.assert_close(model(**batch, all_passes=True).step_logits[0], expected)


def test_text_pairs_reach_encoders_that_tell_them(make_model, batch):
    types = torch.zeros_like(batch["input_ids"])
    types[:, 2:] = 1
    bert = make_model("bert")
    assert not torch.equal(bert(**batch).logits, bert(**batch, token_type_ids=types).logits)
    mpnet = make_model("mpnet")
    assert torch.equal(mpnet(**batch).logits, mpnet(**batch, token_type_ids=types).logits)


def test_sharing_in_groups_is_not_lost(make_model, batch):
    """An ALBERT of several layers ponders as an encoder, layer by layer."""
    model = make_model("albert", encoder={"num_hidden_groups": 2, "inner_group_num": 2})
    assert model.num_passes == 8
    assert not model.stack.shared
    assert model(**batch, all_passes=True).step_logits.shape[0] == 8


def test_dtype_follows_the_model(make_model, batch):
    """In double precision: half precision ends the process on processors without it."""
    model = make_model().double()
    output = model(**batch, all_passes=True, labels=torch.arange(9) % 3)
    assert output.logits.dtype == output.loss.dtype == torch.float64
    assert output.halting.dtype == torch.float32
    assert output.halting.sum(-1).tolist() == pytest.approx([1.0] * 9, abs=1e-5)
    assert model(**batch).logits.dtype == torch.float64


@torch.no_grad()
def test_attention_implementation_and_dtype_are_those_asked_for(make_encoder, batch, tmp_path):
    make_encoder("bert").save_pretrained(tmp_path / "encoder")
    load = PonderEncoderForSequenceClassification.from_pretrained
    wanted = {"attn_implementation": "eager", "dtype": torch.float64}
    model = load(tmp_path / "encoder", **wanted)
    model.save_pretrained(tmp_path / "model")
    for loaded in (
        model,
        load(tmp_path / "model", **wanted, exit_threshold=0.9),
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", **wanted),
    ):
        assert loaded.trunk.config._attn_implementation == "eager"
        assert loaded.dtype == torch.float64
    usual = load(tmp_path / "model")
    assert usual.trunk.config._attn_implementation == "sdpa"
    torch.testing.assert_close(usual(**batch).logits, model(**batch).logits)


def test_a_larger_vocabulary_is_saved(make_model, tmp_path):
    model = make_model()
    model.resize_token_embeddings(70, mean_resizing=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == 70
    assert loaded(torch.full((1, 4), 69)).logits.isfinite().all()


def test_a_copy_is_a_model_of_its_own(make_model, batch):
    model = make_model()
    expected = model(**batch).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**batch).logits, expected)
    assert copied.stack.layers[0] is copied.trunk.encoder.layer[0]


def test_what_is_no_encoder_is_refused(tmp_path, make_model):
    load = PonderEncoderForSequenceClassification.from_pretrained
    GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2' reads from left to right"):
        load(tmp_path)
    t5 = T5EncoderModel(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="'t5' has an encoder and a decoder"):
        PonderEncoderForSequenceClassification.from_encoder(t5)
    with pytest.raises(UserError, match="ponders already"):
        PonderEncoderConfig(encoder=make_model().config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_passes": 13}, "num_passes is 13, but the encoder has 12 layers"),
        ({"num_passes": -1}, "num_passes must be at least 1"),
        ({"classifier_dropout": 1.0}, "classifier_dropout"),
        ({"halting_target": 2.0}, "between 0 and 1"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PonderEncoderConfig(**options)
