"""Inference that stops: equal to one example at a time."""

import pytest
import torch

from deepenough import UserError
from deepenough.ponder.halting import FixedExit, PatienceExit, QuantileExit, SampledExit
from deepenough.ponder.inference import replay, run_batch, select_pass
from tests.ponder.references import run_batch_ref

ARCHITECTURES = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "albert")
POLICIES = {
    "quantile": QuantileExit(0.5),
    "sampled": SampledExit(5),
    "patience": PatienceExit(1),
    "fixed": FixedExit(2),
}


def same(left, right):
    assert torch.equal(left.passes, right.passes)
    torch.testing.assert_close(left.logits, right.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", ["bert", "ponder_albert"])
@torch.no_grad()
def test_batch_equals_one_by_one(make_model, make_albert, make_batch, kind, policy):
    model = make_albert(num_passes=6) if kind == "ponder_albert" else make_model(kind)
    batch = make_batch(rows=14)
    inputs, ids = model.prepare(**batch), torch.arange(14)
    output = run_batch(model, inputs, policy, ids)
    expected = run_batch_ref(model, inputs, policy, ids)
    same(output, expected)
    torch.testing.assert_close(output.halting, expected.halting, rtol=1e-4, atol=1e-5)
    if policy.needs_halting:
        assert len(output.passes.unique()) > 1  # else nobody ever left the batch


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_every_architecture_answers_as_at_full_depth(make_model, batch, kind):
    """Each answer is that of the pass at which the example halted, among those of all passes."""
    model = make_model(kind)
    whole = model(**batch, all_passes=True)
    output = model(**batch)
    same(output, whole)
    assert output.step_logits is None
    for row, passes in enumerate(output.passes.tolist()):
        torch.testing.assert_close(
            output.logits[row], whole.step_logits[passes - 1, row], rtol=1e-4, atol=1e-5
        )
        known = output.halting[row]
        torch.testing.assert_close(
            known[:passes], whole.halting[row, :passes], rtol=1e-4, atol=1e-5
        )
        assert not known[passes:].any()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@torch.no_grad()
def test_replay_tells_what_a_policy_would_do(make_model, batch, policy):
    model = make_model()
    whole = model(**batch, all_passes=True)
    passes = replay(policy, whole.step_logits, whole.halt_logits)
    output = model(**batch, policy=policy)
    assert torch.equal(output.passes, passes)
    torch.testing.assert_close(output.logits, select_pass(whole.step_logits, passes))


@torch.no_grad()
def test_halted_examples_are_not_computed(make_model, batch):
    model = make_model()
    rows = []
    for layer in model.stack.layers:
        layer.intermediate.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    model(**batch)
    rows.clear()  # the first call also learned what layers return
    output = model(**batch)
    running = [(output.passes > index).sum().item() for index in range(output.passes.max())]
    assert rows == running
    assert len(set(rows)) > 1


@torch.no_grad()
def test_padding_goes_when_the_long_texts_have_gone(make_model, batch):
    model = make_model()
    shapes = []
    layer = model.stack.layers[1]
    layer.intermediate.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    batch["attention_mask"][1:, 6:] = 0

    class LongFirst(FixedExit):
        def step(self, view, memory):
            return (torch.arange(len(view.logits)) == 0) | (view.passes > 1), memory

    output = model(**batch, policy=LongFirst())
    assert output.passes[0] == 1
    assert shapes == [(8, 6, 16)]


def test_extremes(make_model, batch):
    model = make_model()
    all_passes = model(**batch, policy=QuantileExit(1.0))
    assert all_passes.passes.tolist() == [4] * 9
    assert all_passes.halting.sum(-1).tolist() == pytest.approx([1.0] * 9)
    assert model(**batch, policy=QuantileExit(1e-9)).passes.tolist() == [1] * 9


def test_the_config_names_the_policy_and_a_seed_repeats_it(make_model, batch):
    model = make_model(exit="sampled", exit_seed=1)
    first, again = model(**batch), model(**batch)
    assert torch.equal(first.passes, again.passes)
    moved = model(**batch, example_ids=torch.arange(100, 109))
    assert not torch.equal(moved.passes, first.passes)


def test_loss_of_answers(make_model, batch):
    model = make_model()
    labels = torch.arange(9) % 3
    output = model(**batch, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits, labels)
    assert output.loss.item() == pytest.approx(expected.item())
    output.loss.backward()  # answers of different passes are one graph
    assert model.trunk.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_a_model_without_halting_refuses_to_guess(make_model, batch):
    model = make_model(objective="weighted", exit="patience")
    assert model(**batch).halting is None
    with pytest.raises(UserError, match="no halting probabilities for QuantileExit"):
        model(**batch, policy=QuantileExit(0.5))


def test_tuple_output(make_model, batch):
    torch.testing.assert_close(model_tuple(make_model(), batch), make_model()(**batch).logits)


def model_tuple(model, batch):
    return model(**batch, return_dict=False)[0]
