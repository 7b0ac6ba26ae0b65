"""PonderAlbert: the states of transformers' AlbertModel at every pass, and its checkpoints."""

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertModel,
    AutoConfig,
    AutoModelForSequenceClassification,
)

from deepenough import UserError
from deepenough.ponder import PonderAlbertConfig, PonderAlbertForSequenceClassification
from deepenough.ponder.policies import FixedExit

SIZES = {
    "vocab_size": 60,
    "embedding_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "initializer_range": 0.3,
}


def states(model, **inputs):
    """`h_0 ... h_N` of a pondering model."""
    calls = model.stack.begin(**inputs)
    result = [calls.hidden]
    for index in range(model.num_passes):
        result.append(model.stack.run(index, result[-1], calls))
    return result


@pytest.mark.parametrize("num_passes", [2, 4, 9])
@torch.no_grad()
def test_checkpoint_gives_alberts_states_at_every_pass(tmp_path, batch, num_passes):
    torch.manual_seed(0)
    AlbertModel(AlbertConfig(**SIZES)).save_pretrained(tmp_path)
    model = PonderAlbertForSequenceClassification.from_pretrained(tmp_path, num_passes=num_passes)
    assert not model.training
    deep = AlbertModel.from_pretrained(tmp_path, num_hidden_layers=num_passes)
    expected = deep(**batch, output_hidden_states=True).hidden_states
    own = states(model, **batch)
    assert len(own) == len(expected) == num_passes + 1
    for ours, theirs in zip(own, expected, strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_a_trained_classifier_keeps_its_answers(tmp_path, batch):
    torch.manual_seed(0)
    config = AlbertConfig(**SIZES, id2label={0: "bad", 1: "so", 2: "good"})
    trained = AlbertForSequenceClassification(config).eval()
    trained.save_pretrained(tmp_path)
    model = PonderAlbertForSequenceClassification.from_pretrained(tmp_path)
    assert model.config.id2label[2] == "good"
    output = model(**batch, policy=FixedExit())
    torch.testing.assert_close(output.logits, trained(**batch).logits)


def test_a_language_models_encoder_loads(tmp_path, batch):
    torch.manual_seed(0)
    saved = AlbertForMaskedLM(AlbertConfig(**SIZES))
    saved.save_pretrained(tmp_path)
    model = PonderAlbertForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    weights = model.albert.encoder.state_dict()
    for name, value in saved.albert.encoder.state_dict().items():
        assert torch.equal(weights[name], value)
    assert model(**batch).logits.shape == (9, 5)


@torch.no_grad()
def test_second_cls_is_a_token_of_its_own(make_albert, batch):
    model = make_albert(halting_head="second_cls")
    inputs = model.prepare(**batch)
    assert inputs.input_ids[:, :2].tolist() == [[2, 2]] * 9
    assert inputs.attention_mask.sum(1).tolist() == (1 + batch["attention_mask"].sum(1)).tolist()
    by_hand = AlbertModel(model.config).eval()
    by_hand.load_state_dict(model.albert.state_dict())
    expected = by_hand(**inputs.as_arguments(), output_hidden_states=True).hidden_states
    for ours, theirs in zip(states(model, **inputs.as_arguments()), expected, strict=True):
        assert torch.equal(ours, theirs)
    halts = model(**batch, all_passes=True).halt_probabilities
    head = model.halting[0]
    expected_first = head(expected[1][:, 1], expected[0][:, 0], torch.zeros(9, 3)).sigmoid()
    torch.testing.assert_close(halts[:, 0], expected_first)


@pytest.mark.parametrize("halting_head", ["previous", "answer", "second_cls"])
@torch.no_grad()
def test_save_and_load(make_albert, batch, tmp_path, halting_head):
    model = make_albert(num_passes=7, halting_head=halting_head, exit_threshold=0.7)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), PonderAlbertConfig)
    for loaded in (
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        PonderAlbertForSequenceClassification.from_pretrained(tmp_path),
    ):
        assert isinstance(loaded, PonderAlbertForSequenceClassification)
        assert (loaded.num_passes, loaded.config.exit_threshold) == (7, 0.7)
        output, expected = loaded(**batch), model(**batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.passes, expected.passes)
    deeper = PonderAlbertForSequenceClassification.from_pretrained(
        tmp_path, num_passes=11, exit="fixed", exit_pass=10
    )
    assert deeper(**batch).passes.tolist() == [10] * 9


def test_a_new_model_halts_as_its_prior():
    torch.manual_seed(0)
    config = PonderAlbertConfig(**(SIZES | {"initializer_range": 0.02}), halting_target=0.3)
    model = PonderAlbertForSequenceClassification(config).eval()
    halts = model(torch.full((1, 4), 5), all_passes=True).halt_probabilities
    assert halts[0, :-1].tolist() == pytest.approx([0.3] * 3, abs=0.03)
    assert halts[0, -1] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_passes": 0}, "num_passes must be at least 1"),
        ({"num_hidden_groups": 2}, "num_hidden_groups = 2"),
        ({"inner_group_num": 2}, "inner_group_num = 2"),
        ({"halting_target": 1.0}, "between 0 and 1"),
        ({"halting_target": 0}, "between 0 and 1"),
        ({"exit_threshold": 0.0}, "above 0 and at most 1"),
        ({"exit_threshold": 1.01}, "above 0 and at most 1"),
        ({"exit_patience": 0}, "exit_patience must be at least 1"),
        ({"exit_pass": 5}, "exit_pass must lie between 1 and num_passes, 4"),
        ({"kl_weight": -1.0}, "must not be negative"),
        ({"early_gradient": 1.5}, "early_gradient must be from 0 to 1"),
        ({"exit": "never"}, "exit must be one of quantile, sampled, confidence, patience, fixed"),
        ({"halting_head": "third"}, "halting_head must be one of"),
        ({"objective": "last"}, "choose confidence, patience or fixed"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        PonderAlbertConfig(**(SIZES | changes))


def test_a_config_changed_afterwards_is_checked_again():
    config = PonderAlbertConfig(**SIZES)
    config.num_passes = 0
    with pytest.raises(UserError, match="num_passes"):
        PonderAlbertForSequenceClassification(config)


def test_checkpoints_of_others_are_refused(tmp_path, make_encoder):
    make_encoder("bert").save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="is a checkpoint of 'bert'"):
        PonderAlbertForSequenceClassification.from_pretrained(tmp_path / "bert")
    AlbertModel(AlbertConfig(**SIZES, num_hidden_groups=2)).save_pretrained(tmp_path / "groups")
    with pytest.raises(UserError, match="num_hidden_groups = 2"):
        PonderAlbertForSequenceClassification.from_pretrained(tmp_path / "groups")


@pytest.mark.parametrize(
    ("halting_head", "limit"), [("previous", 20), ("answer", 20), ("second_cls", 19)]
)
def test_too_long_texts_are_refused(halting_head, limit):
    config = PonderAlbertConfig(**SIZES, halting_head=halting_head)
    model = PonderAlbertForSequenceClassification(config).eval()
    assert model.max_length == limit
    assert model(torch.full((1, limit), 5)).logits.shape == (1, 2)
    with pytest.raises(UserError, match=f"takes at most {limit}"):
        model(torch.full((1, limit + 1), 5))


def test_no_texts_are_refused(make_albert):
    with pytest.raises(UserError, match="neither of them 0"):
        make_albert()(torch.zeros(0, 4, dtype=torch.long))
