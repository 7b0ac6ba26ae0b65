"""The models: shapes, losses, steps at will, masks, saving, and traces that count what was done."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from deepenough.errors import UserError
from deepenough.lazy.layers import smoothed_cross_entropy
from deepenough.lazy.modeling import (
    LazyTransformerConfig,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.lazy.transition import update_gate

MECHANISMS = ["lazy", "universal", "act", "transformer"]
FORMS = [
    *({"mechanism": mechanism} for mechanism in MECHANISMS),
    {"compare": "update"},
    {"norm": "every"},
    {"step_encoding": "sinusoid"},
    {"step_encoding": "learned"},
]
NAMES = [" ".join(map(str, form.values())) for form in FORMS]


@pytest.fixture
def targets():
    wanted = torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(2))
    wanted[1, 3:] = wanted[2, 5:] = -100
    return wanted


def test_default_epsilons_fit_the_gates():
    of_states = LazyTransformerConfig(compare="state").default_epsilons()
    of_updates = LazyTransformerConfig(compare="update").default_epsilons()
    assert 0 < of_states[0] < of_states[-1] < of_updates[0] < of_updates[-1] < 1
    of_angles = LazyTransformerConfig(compare="update", halt_on="angle").default_epsilons()
    assert 0 < of_angles[0] < of_angles[-1] < of_states[0]
    assert LazyTransformerConfig(mechanism="universal").default_epsilons() == ()


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_labels_and_targets_give_one_loss(make_translator, sources, targets, form):
    model = make_translator(**form)
    with_logits = model(**sources, labels=targets)
    alone = model(**sources, targets=targets)
    assert with_logits.logits.shape == (3, 6, 40)
    assert alone.logits is None
    assert torch.allclose(with_logits.loss, alone.loss)
    kept = targets != -100
    literal = F.cross_entropy(with_logits.logits[kept], targets[kept])
    assert torch.allclose(alone.loss, literal)
    assert torch.equal(alone.loss, alone.plain_loss)  # in evaluation nothing is smoothed


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_every_weight_learns(make_translator, sources, targets, form):
    model = make_translator(**form, dropout=0.1, ff_dropout=0.1, label_smoothing=0.1).train()
    output = model(**sources, targets=targets)
    output.loss.backward()
    assert output.trace is None
    assert output.loss != output.plain_loss
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if "encoding" not in name:
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_a_sentence_does_not_depend_on_its_batch(make_translator, sources, targets, form):
    model = make_translator(**form)
    together = model(**sources, labels=targets).logits
    for row, (num_source, num_target) in enumerate([(7, 6), (4, 3), (5, 5)]):
        ids = sources["input_ids"][row : row + 1, :num_source]
        alone = model(ids, labels=targets[row : row + 1, :num_target]).logits
        assert torch.allclose(together[row, :num_target], alone[0], atol=1e-12)


def test_padding_in_front_changes_nothing(make_translator, make_writer):
    ids = torch.tensor([[5, 6, 7]])
    padded, mask = torch.tensor([[3, 3, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    encoder = make_translator().encoder
    plain, shifted = encoder(ids).last_hidden_state, encoder(padded, mask).last_hidden_state
    assert torch.allclose(plain, shifted[:, 2:], atol=1e-12)
    writer = make_writer()
    assert torch.allclose(writer(ids).logits, writer(padded, mask).logits[:, 2:], atol=1e-12)


def test_a_token_sees_no_later_one(make_writer):
    writer = make_writer()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(writer(ids).logits[:, :2], writer(ids[:, :2]).logits, atol=1e-12)


def test_the_causal_models_losses(make_writer):
    writer = make_writer()
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    following = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    assert torch.allclose(writer(ids, labels=ids).loss, writer(ids, targets=following).loss)


@pytest.mark.parametrize("compare", ["state", "update"])
def test_gates_are_those_of_the_states(make_translator, sources, compare):
    """One step by hand: the gate is 1 - cos^2 of the state and what it is compared with."""
    model = make_translator(compare=compare)
    output = model.encoder(**sources, output_hidden_states=True)
    assert output.gates.shape == (3, 7, 3)
    before, after = output.hidden_states[1], output.hidden_states[2]
    gate = output.gates[..., 1]
    update = (after - before) / gate[..., None]
    assert torch.allclose(update_gate(before, update, compare), gate, atol=1e-9)
    assert bool((gate > 0).all() and (gate < 1).all())


def test_a_lazy_model_with_all_gates_open_is_a_universal_transformer(make_translator, sources):
    lazy, universal = make_translator(), make_translator(mechanism="universal")
    universal.load_state_dict(lazy.state_dict())
    assert not torch.allclose(
        lazy.encoder(**sources).last_hidden_state, universal.encoder(**sources).last_hidden_state
    )
    for part in lazy.modules():
        if hasattr(part, "lazy"):
            part.lazy = False
    assert torch.allclose(
        lazy.encoder(**sources).last_hidden_state,
        universal.encoder(**sources).last_hidden_state,
        atol=1e-12,
    )


def test_sharing_needs_fewer_weights(make_translator):
    count = {m: make_translator(mechanism=m).num_parameters() for m in MECHANISMS}
    assert count["lazy"] == count["universal"] < count["act"] < count["transformer"]


def test_steps_can_be_given_at_every_call(make_translator, sources, targets, tmp_path):
    model = make_translator()
    five = model(**sources, labels=targets, encoder_steps=5, decoder_steps=4)
    assert five.encoder_gates.shape[-1] == 5
    assert five.decoder_gates.shape[-1] == 4
    model.save_pretrained(tmp_path)
    again = LazyTransformerForConditionalGeneration.from_pretrained(
        tmp_path, encoder_steps=5, decoder_steps=4, dtype=torch.double
    )
    # Weights read from a file may be aligned differently, so that other kernels multiply them.
    assert torch.allclose(again(**sources, labels=targets).logits, five.logits, atol=1e-12)


def test_a_transformer_makes_no_more_steps_than_it_has_blocks(make_translator, sources):
    model = make_translator(mechanism="transformer")
    model.encoder(**sources, encoder_steps=2)
    with pytest.raises(UserError, match=r"4 steps were asked for, but this Transformer .* has 3"):
        model.encoder(**sources, encoder_steps=4)


def test_act_weighs_the_states_of_its_steps(make_translator, sources):
    model = make_translator(mechanism="act", act_cost=0.5)
    with torch.no_grad():
        for stack in (model.encoder.stack, model.decoder.stack):
            stack.halting.weight.zero_()
            stack.halting.bias.fill_(0.0)  # one half at every step: N is 2, R one half
    output = model.encoder(**sources, output_hidden_states=True)
    mean = (output.hidden_states[1] + output.hidden_states[2]) / 2
    assert torch.allclose(output.last_hidden_state, model.encoder.stack.norm(mean))
    assert output.trace.depth[0].tolist() == [2] * 7
    assert bool(output.trace.ran[0].all())
    labels = torch.tensor([[5, 6]] * 3)
    loss = model(**sources, labels=labels).loss
    assert model.train()(**sources, labels=labels).loss.item() == pytest.approx(
        loss.item() + 0.5 * 2.5 * 2  # of the source and of the target
    )


@pytest.mark.parametrize("name", ["translator", "writer"])
def test_saved_and_loaded_by_the_auto_classes(make_translator, make_writer, tmp_path, name):
    model = make_translator() if name == "translator" else make_writer()
    model.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if name == "translator" else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path, dtype=torch.double)
    assert type(again) is type(model)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LazyTransformerConfig)
    ids = {"input_ids": torch.tensor([[5, 6, 7]])}
    if name == "translator":
        ids["decoder_input_ids"] = torch.tensor([[1, 8]])
    assert torch.allclose(model(**ids).logits, again(**ids).logits, atol=1e-12)
    assert again.output.weight is again.embedding.weight


def test_embeddings_can_be_resized(make_translator, sources):
    model = make_translator()
    model.resize_token_embeddings(44, mean_resizing=False)
    assert model.encoder.embedding is model.decoder.embedding is model.embedding
    assert model(**sources, decoder_input_ids=torch.tensor([[1]] * 3)).logits.shape[-1] == 44


@pytest.mark.parametrize("mechanism", ["lazy", "transformer"])
def test_the_trace_counts_what_torch_counts(make_translator, mechanism):
    model = make_translator(mechanism=mechanism)
    ids, decoder_ids = torch.randint(4, 40, (2, 7)), torch.randint(4, 40, (2, 5))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(ids, decoder_input_ids=decoder_ids)
    traced = output.trace.total_flops + output.encoder_trace.total_flops
    assert traced == counter.get_total_flops()
    assert output.trace.ran.shape == (2, 5, 2)
    assert output.encoder_trace.depth.tolist() == [[3] * 7] * 2


def test_padding_costs_nothing_in_a_trace(make_translator, sources):
    trace = make_translator().encoder(**sources).trace
    mask = sources["attention_mask"].bool()
    assert bool((trace.flops[~mask] == 0).all() and (trace.flops[mask] > 0).all())
    assert trace.depth.sum() == 3 * mask.sum()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encoder_steps": 0}, "encoder_steps must be at least 1"),
        ({"decoder_steps": -1}, "decoder_steps must be at least 1"),
        (
            {"step_encoding": "learned", "max_steps": 2},
            "step encoding of this model covers 2 steps",
        ),
        ({"mechanism": "eager"}, "mechanism must be one of lazy, universal, act, transformer"),
        ({"num_heads": 3}, "multiple of the 3 heads"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"epsilon": 2.0}, "epsilon must be at least 0 and at most 1"),
        ({"mechanism": "universal", "epsilon": 0.1}, "Only lazy models have gates"),
        ({"patience": 0}, "patience must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        LazyTransformerConfig(**changes)


def test_calls_that_cannot_be_are_refused(make_translator, sources):
    model = make_translator(step_encoding="sinusoid", max_steps=4)
    with pytest.raises(UserError, match="at least 1"):
        model.encoder(**sources, encoder_steps=0)
    with pytest.raises(UserError, match="covers 4 steps"):
        model.encoder(**sources, encoder_steps=5)
    with pytest.raises(UserError, match="sequence of 65 tokens is longer than the model's 64"):
        model.encoder(torch.full((1, 65), 5))


def test_a_causal_model_is_no_encoder_decoder(make_writer):
    model = make_writer()
    assert isinstance(model, LazyTransformerForCausalLM)
    assert not model.config.is_encoder_decoder


# -- loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_smoothed_loss_equals_torchs(smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 11, generator=generator)).requires_grad_()
    targets = torch.randint(11, (7,), generator=generator)
    smoothed, plain = smoothed_cross_entropy(logits, targets, smoothing)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert smoothed.item() == pytest.approx(expected.item(), rel=1e-5)
    assert plain.item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert not plain.requires_grad
    own = torch.autograd.grad(3 * smoothed, logits)[0]
    theirs = torch.autograd.grad(3 * expected, logits)[0]
    assert torch.allclose(own, theirs, atol=1e-6)


def test_the_smoothed_loss_by_hand():
    """Two words of equal score: log 2, smoothed or not."""
    smoothed, plain = smoothed_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), 0.1)
    assert smoothed.item() == pytest.approx(0.6931472)
    assert plain.item() == pytest.approx(0.6931472)
