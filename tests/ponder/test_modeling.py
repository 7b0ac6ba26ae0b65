"""Pondering ALBERT and encoders: states, checkpoints, losses, FLOPs, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertModel,
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5EncoderModel,
)

from deepenough import UserError
from deepenough.data.config import MULTI_LABEL
from deepenough.hf.adapter import adapt
from deepenough.ponder.halting import (
    FixedExit,
    HaltingHead,
    QuantileExit,
    SampledExit,
    kl,
    log_geometric,
)
from deepenough.ponder.modeling import (
    PonderAlbertConfig,
    PonderAlbertForSequenceClassification,
    PonderEncoderConfig,
    PonderEncoderForSequenceClassification,
    linear_flops,
)
from tests.ponder.references import ponder_loss_ref

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
    result = [calls[0].hidden]
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
        torch.testing.assert_close(ours, theirs)


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
    assert inputs["input_ids"][:, :2].tolist() == [[2, 2]] * 9
    assert inputs["attention_mask"].sum(1).tolist() == (1 + batch["attention_mask"].sum(1)).tolist()
    by_hand = AlbertModel(model.config).eval()
    by_hand.load_state_dict(model.albert.state_dict())
    expected = by_hand(**inputs, output_hidden_states=True).hidden_states
    for ours, theirs in zip(states(model, **inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    halts = model(**batch, all_passes=True).halt_logits.sigmoid()
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
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(output.passes, expected.passes)
    deeper = PonderAlbertForSequenceClassification.from_pretrained(
        tmp_path, num_passes=11, exit="fixed", exit_pass=10
    )
    assert deeper(**batch).passes.tolist() == [10] * 9


def test_a_new_model_halts_as_its_prior():
    torch.manual_seed(0)
    config = PonderAlbertConfig(**(SIZES | {"initializer_range": 0.02}), halting_target=0.3)
    model = PonderAlbertForSequenceClassification(config).eval()
    halts = model(torch.full((1, 4), 5), all_passes=True).halt_logits.sigmoid()
    assert halts[0].tolist() == pytest.approx([0.3] * 3, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_passes": 0}, "num_passes must be at least 1"),
        ({"num_hidden_groups": 2}, "num_hidden_groups = 2"),
        ({"inner_group_num": 2}, "inner_group_num = 2"),
        ({"halting_target": 1.0}, "above 0 and below 1"),
        ({"halting_target": 0}, "above 0 and below 1"),
        ({"exit_threshold": 0.0}, "above 0 and at most 1"),
        ({"exit_threshold": 1.01}, "above 0 and at most 1"),
        ({"exit_patience": 0}, "exit_patience must be at least 1"),
        ({"exit_pass": 5}, "exit_pass must be at most num_passes, 4"),
        ({"kl_weight": -1.0}, "kl_weight must be at least 0"),
        ({"early_gradient": 1.5}, "early_gradient must be at least 0 and at most 1"),
        ({"exit": "never"}, "exit must be one of quantile, sampled, confidence, patience, fixed"),
        ({"halting_head": "third"}, "halting_head must be one of"),
        ({"objective": "last", "exit": "quantile"}, "choose confidence, patience or fixed"),
    ],
)
def test_impossible_albert_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        PonderAlbertConfig(**(SIZES | changes))


def test_a_config_changed_afterwards_is_checked_again():
    config = PonderAlbertConfig(**SIZES)
    config.num_passes = 0
    with pytest.raises(UserError, match="num_passes"):
        PonderAlbertForSequenceClassification(config)


def test_the_config_of_an_encoder_becomes_one_of_pondering(tmp_path):
    plain = AlbertConfig(**SIZES, num_labels=3)
    AlbertModel(plain).save_pretrained(tmp_path)
    for model in (
        PonderAlbertForSequenceClassification(plain, halting_target=0.3),
        PonderEncoderForSequenceClassification(
            BertConfig(hidden_size=24, num_attention_heads=2, num_labels=3), halting_target=0.3
        ),
        PonderAlbertForSequenceClassification.from_pretrained(tmp_path, config=plain),
    ):
        assert isinstance(model.config, model.config_class) and model.num_labels == 3
        assert model.num_passes == model.encoder_model.config.num_hidden_layers
    assert PonderAlbertForSequenceClassification(plain, exit="sampled").config.exit == "sampled"
    with pytest.raises(UserError, match="A BertConfig is none of an ALBERT"):
        PonderAlbertForSequenceClassification(BertConfig())


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
    own, expected = adapt(model.trunk).states(**batch)[-1], adapt(encoder).states(**batch)[-1]
    torch.testing.assert_close(own, expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert type(loaded.config.encoder) is type(encoder.config)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
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
    torch.testing.assert_close(model.pool(hidden, mask), expected)
    unmasked = model.pool(hidden, None)
    torch.testing.assert_close(unmasked, model.pool(hidden, torch.ones_like(mask)))


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
    moved = bert(**batch).logits - bert(**batch, token_type_ids=types).logits
    assert moved.abs().max() > 1e-3
    mpnet = make_model("mpnet")
    torch.testing.assert_close(mpnet(**batch).logits, mpnet(**batch, token_type_ids=types).logits)


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
    torch.testing.assert_close(copied(**batch).logits, expected)
    assert copied.stack.layers[0] is copied.trunk.encoder.layer[0]


def test_what_is_no_encoder_is_refused(tmp_path, make_model):
    load = PonderEncoderForSequenceClassification.from_pretrained
    GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2' has a decoder"):
        load(tmp_path)
    t5 = T5EncoderModel(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="'t5' has a decoder"):
        PonderEncoderForSequenceClassification.from_encoder(t5)
    with pytest.raises(UserError, match="ponders already"):
        PonderEncoderConfig(encoder=make_model().config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_passes": 13}, "num_passes is 13, but the encoder has 12 layers"),
        ({"num_passes": -1}, "num_passes must be at least 1"),
        ({"classifier_dropout": 1.0}, "classifier_dropout"),
        ({"halting_target": 2.0}, "above 0 and below 1"),
    ],
)
def test_impossible_encoder_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        PonderEncoderConfig(**options)


def count(model, batch, policy):
    """Output and FLOPs; the counter does not know the CPU's fused attention, hence the plain."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = model(**batch, policy=policy)
    return output, counter.get_total_flops()


@pytest.mark.parametrize("policy", [QuantileExit(0.5), FixedExit()], ids=["quantile", "fixed"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_trace_equals_torchs_counter(make_model, batch, kind, policy):
    model = make_model(kind)
    model(**batch)  # the first call also learns what layers return
    output, expected = count(model, batch, policy)
    assert output.trace.total_flops == expected


@pytest.mark.parametrize("halting_head", ["previous", "second_cls"])
def test_trace_of_albert(make_albert, batch, halting_head):
    model = make_albert(num_passes=7, halting_head=halting_head)
    model(**batch)
    output, expected = count(model, batch, SampledExit(3))
    assert output.trace.total_flops == expected
    assert len(output.passes.unique()) > 1
    assert output.trace.ran.shape == (9, 7)
    assert torch.equal(output.trace.ran.sum(-1), output.passes)
    assert torch.equal(output.trace.depth, output.passes)


def test_flops_by_hand(make_model):
    model = make_model(objective="last", exit="fixed", encoder={"num_hidden_layers": 2})
    ids = torch.full((1, 5), 7)
    maps = 4 * 16 * 16 + 2 * 16 * 24
    layer = 5 * 2 * maps + 2 * 2 * 5 * 5 * 16
    head = 2 * (16 * 16 + 16 * 3)
    assert model(ids).trace.flops.tolist() == [2 * (layer + head)]
    assert linear_flops(model.stack.layers[0]) == 2 * maps


OBJECTIVES = [
    {"objective": "ponder"},
    {"objective": "ponder", "halting_head": "second_cls"},
    {"objective": "ponder", "halting_head": "answer"},
    {"objective": "weighted", "exit": "patience"},
    {"objective": "last", "exit": "fixed"},
]


def test_loss_is_the_papers(make_model, batch):
    model = make_model(halting_target=0.3, kl_weight=0.7, classifier_dropout=0.0)
    labels = torch.arange(9) % 3
    output = model(**batch, labels=labels, all_passes=True)
    lambdas = F.pad(output.halt_logits.sigmoid(), (0, 1))
    expected = ponder_loss_ref(output.step_logits, lambdas, labels, 0.3, 0.7)
    assert output.loss.item() == pytest.approx(expected[0], rel=1e-4)
    assert output.terms["task"].item() == pytest.approx(expected[1], rel=1e-4)
    assert output.terms["kl"].item() == pytest.approx(expected[2], rel=1e-4)
    divergence = kl(output.halting.log(), log_geometric(0.3, 4)).mean()
    assert output.terms["kl"].item() == pytest.approx(divergence.item(), rel=1e-4)


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("kind", ["bert", "ponder_albert"])
def test_every_weight_is_trained(make_model, make_albert, batch, options, kind):
    """None is left out: distributed training stops at weights without a gradient."""
    make = make_albert if kind == "ponder_albert" else make_model
    model = make(**options).train()
    output = model(**batch, labels=torch.arange(9) % 3)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert output.step_logits.shape == (4, 9, 3)
    assert output.logits.shape == (9, 3)
    assert output.trace is None


def test_baselines_weigh_passes(make_model, batch):
    labels = torch.arange(9) % 3
    for objective, weights in (("last", [0, 0, 0, 1]), ("weighted", [0.1, 0.2, 0.3, 0.4])):
        model = make_model(objective=objective, exit="fixed")
        output = model(**batch, labels=labels, all_passes=True)
        each = [F.cross_entropy(step, labels).item() for step in output.step_logits]
        expected = sum(w * value for w, value in zip(weights, each, strict=True))
        assert output.loss.item() == pytest.approx(expected, rel=1e-5)
        assert output.halting is None


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"problem_type": "regression"}, "A regression has one value: got num_labels 3"),
        ({"num_labels": 1, "exit": "confidence"}, "A value has no probability: choose"),
    ],
)
def test_labels_that_do_not_fit_the_problem_are_refused(make_model, options, reason):
    with pytest.raises(UserError, match=reason):
        make_model(**options)


@pytest.mark.parametrize("options", [{"num_labels": 1}, {"problem_type": MULTI_LABEL}, {}])
def test_halting_reads_the_lead_of_an_answer_where_one_leads(make_model, options):
    heads = make_model(halting_head="answer", **options).halting
    assert {head.kind for head in heads} == {"previous" if options else "answer"}


def test_learns(make_albert, make_batch):
    """The first word says the label, another how sure to be: enough to see that all parts move."""
    torch.manual_seed(0)
    model = make_albert(num_passes=3, num_labels=2, kl_weight=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = make_batch(rows=32, length=5)
    labels = (batch["input_ids"][:, 1] > 30).long()
    losses = []
    for _ in range(25):
        output = model.train()(**batch, labels=labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.terms["task"].item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_checkpointing_changes_nothing(make_model, batch):
    labels = torch.arange(9) % 3
    gradients = []
    for enabled in (False, True):
        model = make_model(
            classifier_dropout=0.0,
            encoder={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ).train()
        if enabled:
            # Newer versions of transformers renamed it and warn at the old name.
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)()
        model(**batch, labels=labels).loss.backward()
        gradients.append(model.trunk.embeddings.word_embeddings.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 0, 5, 1, 2, 0, 1], "label of example 4 is 5"),
        ([0, 1, -1, 0, 0, 1, 2, 0, 1], "label of example 2 is -1"),
        ([0, 1], "9 examples need as many labels"),
    ],
)
def test_labels_that_cannot_be_are_named(make_model, batch, labels, message):
    with pytest.raises(UserError, match=message):
        make_model()(**batch, labels=labels)


def test_labels_may_be_lists_but_not_fractions(make_model, batch):
    model = make_model()
    listed = model(**batch, labels=[0, 1, 2] * 3).loss
    assert listed.item() == pytest.approx(model(**batch, labels=torch.arange(9) % 3).loss.item())
    with pytest.raises(UserError, match="whole numbers"):
        model(**batch, labels=[0.5] * 9)


def test_a_lead_of_the_best_answer_can_hasten_the_halt():
    head = HaltingHead("answer", width=4)
    with torch.no_grad():
        head.lead.fill_(0.2)
        head.bias.fill_(-1.0)
        head.out.weight.zero_()
    now, before = torch.randn(2, 2, 4)
    logits = torch.tensor([[0.5, 3.0, 1.0], [0.2, 0.1, -1.0]], requires_grad=True)
    halt = head(now, before, logits)
    assert halt.tolist() == pytest.approx([-1.0 + 2.0 * 2.0, -1.0 + 2.0 * 0.1])
    halt.sum().backward()
    assert logits.grad is None


def test_early_answers_can_be_kept_from_the_encoder(make_model, batch):
    labels = torch.arange(9) % 3

    model = make_model(objective="weighted", exit="fixed").train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0

    def gradients(objective: str, share: float) -> dict[str, torch.Tensor]:
        model.config.objective, model.config.early_gradient = objective, share
        model.zero_grad()
        model(**batch, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.encoder_model.named_parameters()}

    whole, none = gradients("weighted", 1.0), gradients("weighted", 0.0)
    half, last = gradients("weighted", 0.5), gradients("last", 1.0)
    for name in last:
        # The last of four answers has four tenths of the weight.
        torch.testing.assert_close(none[name], 0.4 * last[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(half[name], (whole[name] + none[name]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", ["previous", "answer", "second_cls"])
def test_each_path_of_an_early_gradient_has_its_share_once(make_model, batch, head):
    model = make_model(halting_head=head, exit="fixed").train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    hidden = [torch.randn(9, 7, 16, requires_grad=True) for _ in range(3)]

    def gradients(share: float) -> list[list[torch.Tensor]]:
        """Of the answers and the halting logits of two passes, to the states that they read."""
        model.config.early_gradient = share
        before, found = model.pool(hidden[0], None), []
        for index in (0, 1):
            logits, halt, before = model.read(index, hidden[1 + index], None, before)
            for output in (logits, halt):
                found.append(
                    torch.autograd.grad(
                        output.square().sum(),
                        hidden,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
        return found

    whole, part = gradients(1.0), gradients(0.3)
    reads_previous = [bool(path[number // 2].abs().max()) for number, path in enumerate(whole)]
    assert reads_previous == [False, head != "second_cls"] * 2
    for path, expected in zip(part, whole, strict=True):
        for gradient, full in zip(path, expected, strict=True):
            torch.testing.assert_close(gradient, 0.3 * full)
