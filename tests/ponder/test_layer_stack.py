"""Encoders as single steps: equal to a whole forward pass, and nothing left behind in them."""

import threading

import pytest
import torch

from deepenough import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.intercept import LayerStack

ARCHITECTURES = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "albert")


def stack_of(encoder):
    adapter = adapt(encoder)
    return adapter, LayerStack(adapter.trunk, adapter.layers)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_steps_equal_the_encoders_own_pass(make_encoder, batch, kind):
    adapter, stack = stack_of(make_encoder(kind))
    expected = adapter.states(**batch)
    for _ in range(2):  # the first time also learns what layers return
        calls = stack.begin(**batch)
        hidden = calls[0].hidden
        torch.testing.assert_close(hidden, expected[0])
        for index in range(adapter.num_layers):
            hidden = stack.run(index, hidden, calls)
            torch.testing.assert_close(hidden, expected[index + 1])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_encoder_is_left_as_it_was(make_encoder, batch, kind):
    encoder = make_encoder(kind)
    before = encoder(**batch).last_hidden_state
    _, stack = stack_of(encoder)
    stack.begin(**batch)
    assert all("forward" not in layer.__dict__ for layer in stack.layers)
    torch.testing.assert_close(encoder(**batch).last_hidden_state, before)


def test_layers_compute_nothing_while_they_stand_by(make_encoder, batch):
    _, stack = stack_of(make_encoder("bert"))
    stack.begin(**batch)
    seen = []
    stack.layers[0].attention.register_forward_hook(lambda *_: seen.append(1))
    stack.begin(**batch)
    assert seen == []


def test_errors_restore_the_layers(make_encoder, batch):
    _, stack = stack_of(make_encoder("bert"))
    with pytest.raises(IndexError):
        stack.begin(input_ids=batch["input_ids"] + 1000)
    assert all("forward" not in layer.__dict__ for layer in stack.layers)


def test_learning_draws_nothing(make_encoder, batch):
    """The first call must leave the random generator where any other call does."""
    _, stack = stack_of(make_encoder("bert").train())
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        stack.begin(**batch)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)
    assert stack.layers[0].training


def test_another_thread_may_run_a_layer_that_stands_by(make_encoder, batch):
    encoder = make_encoder("bert")
    _, stack = stack_of(encoder)
    calls = stack.begin(**batch)
    expected = stack.run(0, calls[0].hidden, calls)
    results = []

    def meanwhile(*_):
        thread = threading.Thread(
            target=lambda: results.append(stack.run(0, calls[0].hidden, calls))
        )
        thread.start()
        thread.join()

    hook = encoder.embeddings.register_forward_hook(meanwhile)
    stack.begin(**batch)
    hook.remove()
    torch.testing.assert_close(results[0], expected)


def test_layers_that_are_skipped_are_noticed(make_encoder, batch):
    encoder = make_encoder("bert")
    _, stack = stack_of(encoder)
    encoder.encoder.layer = encoder.encoder.layer[:2]
    with pytest.raises(UserError, match="called 2 of its 4 layers"):
        stack.begin(**batch)


def test_a_forward_of_the_users_own_is_kept(make_encoder, batch):
    _, stack = stack_of(make_encoder("bert"))
    layer = stack.layers[1]
    own = layer.forward = layer.forward
    stack.begin(**batch)
    assert layer.__dict__["forward"] is own
