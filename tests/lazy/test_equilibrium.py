"""Equilibrium exit: equal to a slow reference, neutral at 0, the same for every batch."""

from itertools import pairwise

import pytest
import torch

from deepenough.errors import UserError
from deepenough.lazy.equilibrium import run_in_full, run_with_halting
from deepenough.lazy.layers import (
    EncoderMemory,
    PaddedContext,
    StepOptions,
    causal_mask,
    padding_mask,
)
from deepenough.lazy.transition import step_similarity
from deepenough.nn.layers import Dropout

STEPS = 6


def median_gate(model, sources, steps=STEPS):
    gates = model.encoder(**sources, encoder_steps=steps).gates
    return float(gates[sources["attention_mask"].bool()].median())


@torch.no_grad()
def median_angle(model, sources):
    output = model.encoder(**sources, encoder_steps=STEPS, output_hidden_states=True)
    change = 1.0 - step_similarity(output.hidden_states)
    return float(change[sources["attention_mask"].bool()].median())


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"step_encoding": "learned"},
        {"norm": "every"},
        {"halt_on": "angle"},
        {"halt_on": "angle", "norm": "every", "compare": "update"},
    ],
)
def test_equal_to_the_reference(make_translator, sources, form, patience):
    model = make_translator(**form)
    stack, mask = model.encoder.stack, sources["attention_mask"]
    state = model.encoder.embed(sources["input_ids"]).detach()
    positions = stack.encoding.positions(0, state)
    context = PaddedContext(2, padding_mask(mask))
    epsilon = (median_angle if "halt_on" in form else median_gate)(model, sources)
    with torch.no_grad():
        args = (stack, state, positions, context, StepOptions(STEPS, epsilon, patience))
        fast, slow = run_with_halting(*args, mask), run_in_full(*args)
    real = mask.bool()
    assert torch.allclose(fast.state[real], slow.state[real], atol=1e-12)
    assert torch.allclose(fast.gates[real], slow.gates[real], atol=1e-12)
    assert torch.equal(fast.ran[real], slow.ran[real])
    stopped = fast.depth[real]
    assert 1 <= stopped.min() < stopped.max() <= STEPS, "the case shows nothing"
    assert int(fast.depth[~real].sum()) == 0


@pytest.mark.parametrize("patience", [1, 2])
def test_the_decoders_too(make_translator, sources, patience):
    model = make_translator()
    stack = model.decoder.stack
    ids = torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        states = model.encoder(**sources).last_hidden_state
        state = model.decoder.embed(ids)
        positions = stack.encoding.positions(0, state)
        memory = EncoderMemory(states, padding_mask(sources["attention_mask"]), 2)
        context = PaddedContext(2, causal_mask(None, 6, 6, state.device), memory=memory)
        epsilon = float(stack(state, positions, context, STEPS).gates.median())
        args = (stack, state, positions, context, StepOptions(STEPS, epsilon, patience))
        fast, slow = run_with_halting(*args), run_in_full(*args)
    assert torch.allclose(fast.state, slow.state, atol=1e-12)
    assert torch.equal(fast.ran, slow.ran)
    assert fast.depth.min() < fast.depth.max()


def test_training_halts_as_inference_does_and_learns_from_it(make_translator, sources):
    """Without dropout the same states; with it the same tokens halt, by their clean states."""
    model = make_translator(norm="every", halt_on="angle", compare="update", clean_gates=True)
    epsilon = median_angle(model, sources)
    halting = {"encoder_steps": STEPS, "epsilon": epsilon}
    expected = model.encoder(**sources, **halting)
    usual = model.encoder(**sources, encoder_steps=STEPS).last_hidden_state
    model.train()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    model.config.epsilon = epsilon  # which a call in training must give itself
    assert torch.allclose(model.encoder(**sources, encoder_steps=STEPS)[0], usual, atol=1e-12)
    found = model.encoder(**sources, **halting).last_hidden_state
    real = sources["attention_mask"].bool()
    assert torch.allclose(found[real], expected.last_hidden_state[real], atol=1e-12)
    assert not torch.allclose(found[real], usual[real], atol=1e-3)
    found[real].square().sum().backward()
    assert all(float(weight.grad.norm()) > 0 for weight in model.encoder.stack.parameters())


@torch.no_grad()
def test_tokens_rest_after_the_first_step_that_turns_them_less_than_epsilon(
    make_translator, sources
):
    model = make_translator(halt_on="angle")
    one = {"input_ids": sources["input_ids"][:1, :1], "attention_mask": torch.ones(1, 1).long()}
    output = model.encoder(**one, encoder_steps=STEPS, output_hidden_states=True)
    angles = [
        torch.acos(torch.nn.functional.cosine_similarity(a[0, 0], b[0, 0], dim=0))
        for a, b in pairwise(output.hidden_states)
    ]
    turns = [float(angle.sin() ** 2) for angle in angles]
    epsilon = sorted(turns)[1] * 1.001
    first = next(step for step, turn in enumerate(turns, 1) if turn < epsilon)
    assert first < STEPS
    trace = model.encoder(**one, encoder_steps=STEPS, epsilon=epsilon).trace
    assert trace.depth.tolist() == [[first]]


@pytest.mark.parametrize("halt_on", ["gate", "angle"])
def test_what_tokens_halt_by_is_an_option_of_the_call(
    make_translator, make_writer, sources, halt_on
):
    other = {"gate": "angle", "angle": "gate"}[halt_on]
    ids = sources["input_ids"]
    for make, options in (
        (make_translator, {"epsilon": 0.3, "encoder_steps": STEPS, "decoder_input_ids": ids}),
        (make_writer, {"decoder_epsilon": 0.3, "decoder_steps": STEPS}),
    ):
        expected = make(halt_on=halt_on)(ids, **options)
        found = make(halt_on=other)(ids, **options, halt_on=halt_on)
        without = make(halt_on=other)(ids, **options)
        assert torch.equal(found.logits, expected.logits)
        assert not torch.equal(without.logits, expected.logits)


def test_tokens_halt_by_nothing_else(make_translator, sources):
    with pytest.raises(UserError, match="halt_on must be gate or angle: got 'turn'"):
        make_translator().encoder(**sources, epsilon=0.3, halt_on="turn")


def test_with_epsilon_0_it_is_the_full_model(make_translator, sources):
    model = make_translator()
    full = model.encoder(**sources)
    zero = model.encoder(**sources, epsilon=0.0)
    assert torch.allclose(full.last_hidden_state, zero.last_hidden_state, atol=1e-12)
    assert torch.allclose(full.gates, zero.gates, atol=1e-12)
    assert zero.trace.total_flops == full.trace.total_flops


def test_the_compacted_path_without_anyone_stopping_is_the_full_model(make_translator, sources):
    model = make_translator()
    full = model.encoder(**sources, encoder_steps=STEPS)
    least = float(full.gates[sources["attention_mask"].bool()].min())
    moving = model.encoder(**sources, encoder_steps=STEPS, epsilon=least / 2)
    real = sources["attention_mask"].bool()
    assert torch.allclose(full.last_hidden_state[real], moving.last_hidden_state[real], atol=1e-12)
    assert moving.trace.total_flops == full.trace.total_flops


def test_with_epsilon_1_all_stop_after_their_patience(make_translator, sources):
    model = make_translator()
    trace = model.encoder(**sources, encoder_steps=STEPS, epsilon=1.0, patience=2).trace
    assert trace.depth[0].tolist() == [2] * 7
    full = model.encoder(**sources, encoder_steps=2).trace
    assert trace.total_flops == full.total_flops


def test_a_batch_is_its_sentences_one_by_one(make_translator, sources):
    model = make_translator()
    epsilon = median_gate(model, sources)
    together = model.encoder(**sources, encoder_steps=STEPS, epsilon=epsilon)
    depths = set()
    for row, length in enumerate([7, 4, 5]):
        alone = model.encoder(
            sources["input_ids"][row : row + 1, :length], encoder_steps=STEPS, epsilon=epsilon
        )
        assert torch.allclose(
            together.last_hidden_state[row, :length], alone.last_hidden_state[0], atol=1e-12
        )
        assert torch.equal(together.trace.depth[row, :length], alone.trace.depth[0])
        depths |= set(alone.trace.depth[0].tolist())
    assert len(depths) > 1


def test_rows_of_the_matrix_products_shrink(make_translator, sources):
    model = make_translator()
    epsilon = median_gate(model, sources)
    rows = []
    layer = model.encoder.stack.transitions[0].block.ff_in
    handle = layer.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    trace = model.encoder(**sources, encoder_steps=STEPS, epsilon=epsilon).trace
    handle.remove()
    assert rows == trace.ran.flatten(0, 1).sum(0).tolist()[: len(rows)]
    assert rows[0] == 16  # of 21 places, those that are no padding
    assert rows[-1] < 16


def test_states_of_stopped_tokens_stay(make_translator, sources):
    model = make_translator()
    epsilon = median_gate(model, sources)
    output = model.encoder(
        **sources, encoder_steps=STEPS, epsilon=epsilon, output_hidden_states=True
    )
    states = torch.stack(output.hidden_states, 2)  # [B, T, N + 1, D]
    changed = (states[:, :, 1:] != states[:, :, :-1]).any(-1)
    assert torch.equal(changed, output.trace.ran)
    assert bool((output.gates[~output.trace.ran] == 0).all())


def test_training_lets_no_token_stop(make_translator, sources):
    model = make_translator(epsilon=1.0).train()
    output = model(**sources, labels=torch.tensor([[5, 6]] * 3))
    full = make_translator().train()(**sources, labels=torch.tensor([[5, 6]] * 3))
    assert torch.allclose(output.loss, full.loss, atol=1e-12)


def test_models_without_gates_refuse(make_translator, sources):
    with pytest.raises(UserError, match="Only lazy models"):
        make_translator(mechanism="act").encoder(**sources, epsilon=0.5)
