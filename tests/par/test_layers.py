"""Blocks as the paper's formula reads; draws, limits and gradients of the choice; FLOPs."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from deepenough.par.config import IDENTITY, OPEN
from deepenough.par.layers import (
    BranchChoice,
    ParBlock,
    RelativeContext,
    branch_flops,
    gumbel_noise,
    head_flops,
    hide_padding,
    relative_context,
)


def make_block(config, kind: str) -> tuple[ParBlock, RelativeContext, torch.Tensor]:
    torch.manual_seed(0)
    block = ParBlock(config, kind).eval()
    hidden = torch.randn(3, 5, config.d_model)
    shape = (5, 5, config.sliding_window, config.d_model)
    context = relative_context(*shape, hidden.dtype, hidden.device)
    return block, context, hidden


def test_open_block_is_the_weighted_sum_of_three_residual_branches(make_config):
    block, context, hidden = make_block(make_config(), OPEN)
    normed = F.layer_norm(hidden, (16,))
    key, value = block.attention.keys_values(normed)
    attended = hidden + block.attention(normed, key, value, context.codes, context.mask)
    dense = hidden + block.dense.down(block.dense.up(normed).relu())
    weights = torch.rand(3, 3).softmax(-1)
    w_a, w_d, w_i = weights.T[..., None, None]
    expected = w_a * attended + w_d * dense + w_i * hidden
    torch.testing.assert_close(block(hidden, context, weights_B3=weights)[0], expected)


def test_identity_returns_what_it_got(make_config):
    block, context, hidden = make_block(make_config(), IDENTITY)
    assert block(hidden, context)[0] is hidden
    assert not list(block.parameters())


@pytest.mark.parametrize("kind", ["a", "d", "*"])
def test_every_new_state_comes_with_the_normalised_old_one(make_config, kind):
    block, context, hidden = make_block(make_config(), kind)
    new, normed = block(hidden, context, weights_B3=torch.ones(3, 3) if kind == OPEN else None)
    assert not torch.equal(new, hidden)
    torch.testing.assert_close(normed, F.layer_norm(hidden, (16,)))


def test_dropout_falls_on_the_update_alone(make_config):
    block, context, hidden = make_block(make_config(dropout=0.5), "d")
    full = block(hidden, context)[0] - hidden
    block.train()
    update = block(hidden, context)[0] - hidden
    dropped = update.abs() < 1e-6
    assert 0.3 < float(dropped.float().mean()) < 0.7
    torch.testing.assert_close(update[~dropped], 2 * full[~dropped], atol=1e-5, rtol=1e-5)


def test_contexts_are_made_once_for_every_shape():
    shape, device = (3, 5, 9, 16), torch.device("cpu")
    found = relative_context(*shape, torch.float32, device)
    assert relative_context(*shape, torch.float32, device) is found
    assert hide_padding(found, None) is found and hide_padding(found, torch.ones(2, 5)) is found
    assert relative_context(*shape, torch.float64, device).mask.dtype == torch.float64


def test_padding_is_counted_from_the_newest_key():
    context = relative_context(4, 6, 9, 16, torch.float32, torch.device("cpu"))
    lowest = torch.finfo(torch.float32).min
    # Six keys: two of memory, which the mask of four does not know, then padding, then text.
    mask = hide_padding(context, torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])).mask
    assert mask.shape == (2, 1, 4, 6)
    assert mask[0, 0, 3].tolist() == [0, 0, lowest, 0, 0, 0]
    assert mask[1, 0, 0].tolist() == [0, 0, 0, lowest, lowest, lowest]
    assert mask.isfinite().all()


# -- the choice between branches


def make_choice(
    straight_through: bool = False, learn_tau: bool = False, num_blocks: int = 4
) -> BranchChoice:
    torch.manual_seed(0)
    choice = BranchChoice(OPEN * num_blocks, straight_through, learn_tau)
    torch.nn.init.normal_(choice.alpha)
    return choice


@given(
    alpha=st.lists(st.floats(-30, 30), min_size=3, max_size=3),
    tau=st.floats(0.05, 5.0),
    training=st.booleans(),
    straight_through=st.booleans(),
)
def test_weights_are_a_distribution(alpha, tau, training, straight_through):
    choice = BranchChoice(OPEN, straight_through, learn_tau=False).train(training)
    choice.alpha.data[0] = torch.tensor(alpha)
    choice.set_tau(tau)
    weights = choice(5, None)
    assert weights.shape == (1, 5, 3)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 5))


def test_training_weights_equal_the_formula():
    choice = make_choice()
    choice.set_tau(0.7)
    noise = gumbel_noise(4, 6)
    log_pi = choice.probabilities().log()
    expected = ((log_pi[:, None] + noise) / 0.7).softmax(-1)
    torch.testing.assert_close(choice(6, noise), expected)


def test_evaluation_draws_no_noise():
    choice = make_choice().eval()
    choice.set_tau(0.5)
    state = torch.get_rng_state()
    weights = choice(3, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights, choice(3, gumbel_noise(4, 3)))
    expected = (choice.probabilities().log() / 0.5).softmax(-1)[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(weights, expected)


def test_training_draws_anew():
    choice = make_choice()
    assert not torch.equal(choice(3, None), choice(3, None))


def test_every_stream_and_block_has_its_own_draw():
    weights = make_choice()(5, None)
    assert len(weights.reshape(-1, 3).unique(dim=0)) == 4 * 5


def test_draws_of_a_low_temperature_follow_pi():
    """Gumbel's trick: the argmax of `log pi + g` is a sample of `pi`."""
    choice = make_choice(num_blocks=1)
    choice.set_tau(0.01)
    streams = 20_000
    shares = choice(streams, None)[0].mean(0)
    pi = choice.probabilities()[0]
    error = 5 * (pi * (1 - pi) / streams).sqrt()
    assert ((shares - pi).abs() < error + 0.005).all()


def test_noise_is_gumbel_and_repeats_with_its_generator():
    noise = gumbel_noise(100, 200, torch.Generator().manual_seed(3))
    assert torch.equal(noise, gumbel_noise(100, 200, torch.Generator().manual_seed(3)))
    assert noise.isfinite().all()
    deviation = math.pi / math.sqrt(6)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=5 * deviation / math.sqrt(60_000))
    assert float(noise.std()) == pytest.approx(deviation, rel=0.03)


def test_low_temperature_gives_one_branch():
    choice = make_choice()
    noise = gumbel_noise(4, 6)
    choice.set_tau(1e-4)
    winner = (choice.alpha.log_softmax(-1)[:, None] + noise).argmax(-1)
    torch.testing.assert_close(choice(6, noise), F.one_hot(winner, 3).float())
    choice.eval()
    likeliest = F.one_hot(choice.alpha.argmax(-1), 3).float()[:, None].expand(-1, 6, -1)
    torch.testing.assert_close(choice(6, None), likeliest)


@pytest.mark.parametrize("training", [True, False])
def test_straight_through_is_one_branch_with_the_soft_gradient(training):
    hard, soft = make_choice(straight_through=True), make_choice()
    noise, reader = gumbel_noise(4, 6), torch.randn(4, 6, 3)
    gradients = []
    for choice in (hard, soft):
        choice.train(training)
        weights = choice(6, noise)
        (weights * reader).sum().backward()
        gradients.append(choice.alpha.grad)
        if choice is hard:
            assert set(weights.unique().tolist()) == {0.0, 1.0}
            assert (weights.sum(-1) == 1).all()
    torch.testing.assert_close(*gradients)
    assert (gradients[0].abs().sum(-1) > 0).all()


def test_learned_temperature_has_an_effect_and_a_gradient():
    choice = make_choice(learn_tau=True)
    noise = gumbel_noise(4, 6)
    warm = choice(6, noise)
    (warm * torch.randn(4, 6, 3)).sum().backward()
    assert choice.log_tau.grad.abs() > 0
    choice.set_tau(0.25)
    assert choice.temperature.item() == pytest.approx(0.25)
    cold = choice(6, noise)
    assert (cold.max(-1).values > warm.max(-1).values).all()
    expected = ((choice.alpha.log_softmax(-1)[:, None] + noise) / 0.25).softmax(-1)
    torch.testing.assert_close(cold, expected)


def test_given_temperature_is_no_parameter():
    choice = make_choice()
    assert [name for name, _ in choice.named_parameters()] == ["alpha"]
    choice.set_tau(0.3)
    assert float(choice.temperature) == pytest.approx(0.3)


def test_probabilities_are_the_softmax_of_alpha_where_a_block_is_open():
    choice = BranchChoice("*-*", straight_through=False, learn_tau=False)
    torch.nn.init.normal_(choice.alpha)
    rows = choice.probabilities()
    torch.testing.assert_close(rows[[0, 2]], choice.alpha.softmax(-1)[[0, 2]])
    torch.testing.assert_close(rows[1], torch.tensor([0.0, 0.0, 1.0]))
    (rows @ torch.tensor([3.0, 2.0, 1.0])).sum().backward()
    assert (choice.alpha.grad[1] == 0).all()
    assert (choice.alpha.grad[[0, 2]] != 0).all()


# -- FLOPs

FORMS = [
    {"pattern": "a"},
    {"pattern": "d"},
    {"pattern": "aad-d"},
    {"num_blocks": 3},
    {"pattern": "a*-d"},
    {"pattern": "ad", "cutoffs": [10, 20]},
    {"num_blocks": 2, "cutoffs": [10, 20]},
    {"pattern": "ad", "num_heads": 4, "mem_len": 0},
    {"pattern": "ad", "tie_word_embeddings": False},
]
NAMES = [" ".join(f"{value}" for value in form.values()) for form in FORMS]


def count(model, *args, **kwargs):
    """Output of one evaluation pass, and its FLOPs by torch's counter.

    The counter does not know the CPU's fused attention, hence the plain one.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = model(*args, **kwargs)
    assert counter.get_total_flops() > 0
    return output, counter.get_total_flops()


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("streams", [1, 3])  # few queries take another way to the positions
def test_trace_equals_torchs_counter_along_a_stream(make_model, form, streams):
    model = make_model(**form)
    memories = None
    for _ in range(3):
        ids, targets = torch.randint(0, 40, (2, streams, 5))
        output, expected = count(model, ids, targets=targets, memories=memories)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
        output, expected = count(model, ids, memories=memories)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
        memories = output.memories


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("streams", [1, 3])
def test_trace_equals_torchs_counter_in_generation(make_model, form, streams):
    model = make_model(**form)
    cache = DynamicCache(config=model.config)
    window = model.config.sliding_window
    for num_new in (6, 1, 2, *[1] * window):
        ids = torch.randint(0, 40, (streams, num_new))
        output, expected = count(model, ids, past_key_values=cache, logits_to_keep=1)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cutoffs", [[], [10, 20]])
def test_ignored_targets_cost_no_adaptive_softmax(make_model, cutoffs):
    model = make_model(pattern="ad", cutoffs=cutoffs)
    ids, targets = torch.randint(0, 40, (2, 3, 5))
    targets[:, 3:] = -100
    output, expected = count(model, ids, targets=targets)
    assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
    output, expected = count(model, ids, labels=targets)
    assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)


def test_head_by_hand(make_config):
    config = make_config(cutoffs=[10, 20])
    # Head: 10 tokens and 2 clusters. Tails: width 8 with 10 tokens, width 4 with 20.
    head, first, second = 2 * 16 * 12, 2 * 8 * (16 + 10), 2 * 4 * (16 + 20)
    targets = torch.tensor([3, 10, 39, -100])
    assert head_flops(config, 4, targets).tolist() == [head, head + first, head + second, 0]
    assert head_flops(config, 2).tolist() == [head + first + second] * 2
    assert head_flops(make_config(), 1, torch.tensor([3])).tolist() == [2 * 16 * 40]


def test_cached_keys_are_not_projected_again(make_config):
    config = make_config()
    saved = branch_flops(config, "a", 1, 1, 9) - branch_flops(config, "a", 1, 1, 9, projected=1)
    assert saved == 2 * 8 * 2 * 16 * 16
