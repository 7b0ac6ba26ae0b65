"""The choice between branches: its draws, its limits, its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from deepenough.par.choice import BranchChoice, entropy, gumbel_noise


def make_choice(
    straight_through: bool = False, learn_tau: bool = False, num_blocks: int = 4
) -> BranchChoice:
    torch.manual_seed(0)
    choice = BranchChoice(num_blocks, straight_through, learn_tau)
    torch.nn.init.normal_(choice.alpha)
    return choice


@given(
    alpha=st.lists(st.floats(-30, 30), min_size=3, max_size=3),
    tau=st.floats(0.05, 5.0),
    training=st.booleans(),
    straight_through=st.booleans(),
)
def test_weights_are_a_distribution(alpha, tau, training, straight_through):
    choice = BranchChoice(1, straight_through, learn_tau=False).train(training)
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


def test_every_lane_and_block_has_its_own_draw():
    weights = make_choice()(5, None)
    assert len(weights.reshape(-1, 3).unique(dim=0)) == 4 * 5


def test_draws_of_a_low_temperature_follow_pi():
    """Gumbel's trick: the argmax of `log pi + g` is a sample of `pi`."""
    choice = make_choice(num_blocks=1)
    choice.set_tau(0.01)
    lanes = 20_000
    shares = choice(lanes, None)[0].mean(0)
    pi = choice.probabilities()[0]
    error = 5 * (pi * (1 - pi) / lanes).sqrt()
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


def test_probabilities_are_the_softmax_of_alpha():
    choice = make_choice()
    rows = choice.probabilities()
    torch.testing.assert_close(rows, choice.alpha.softmax(-1))
    torch.testing.assert_close(rows.sum(-1), torch.ones(4))


def test_closed_blocks_are_not_pushed_any_more():
    choice = make_choice()
    choice.decided[1] = 2
    (choice.probabilities() @ torch.tensor([3.0, 2.0, 1.0])).sum().backward()
    assert (choice.alpha.grad[1] == 0).all()
    assert (choice.alpha.grad[[0, 2, 3]] != 0).all()


def test_entropy_from_undecided_to_decided():
    assert entropy(torch.full((4, 3), 1 / 3)) == pytest.approx(1.0)
    assert entropy(torch.eye(3)) == 0.0
    halves = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert entropy(halves) == pytest.approx(0.5 * math.log(2) / math.log(3))
