"""The lazy transition: the gate by hand and by the literal formula, gradients, dropout, norm."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepenough.lazy.transition import (
    LazyTransition,
    dropout_noise,
    squared_cosine,
    step_cka,
    step_similarity,
    update_gate,
)


def linear_cka_ref(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the CKA of one token's two vectors by the literal formula.

    `<K, L> / sqrt(<K, K> * <L, L>)` with `K = x x^T` and `L = y y^T` (arXiv 1905.00414, eq. 1 and
    3, without centring).
    """
    gram_x, gram_y = torch.outer(x, x), torch.outer(y, y)
    inner = (gram_x * gram_y).sum()
    return inner / ((gram_x * gram_x).sum() * (gram_y * gram_y).sum()).sqrt()


class Fixed(nn.Module):
    """A block whose update is given."""

    def __init__(self, update: torch.Tensor) -> None:
        super().__init__()
        self.update = nn.Parameter(update)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.update.expand_as(state)


def test_the_gate_by_hand():
    x = torch.tensor([[3.0, 4.0], [3.0, 4.0], [1.0, 0.0], [1.0, 0.0]])
    y = torch.tensor([[6.0, 8.0], [-4.0, 3.0], [1.0, 1.0], [-5.0, 0.0]])
    # parallel, orthogonal, 45 degrees, opposite
    assert squared_cosine(x, y).tolist() == pytest.approx([1.0, 0.0, 0.5, 1.0])
    assert update_gate(x, y).tolist() == pytest.approx([0.0, 1.0, 0.5, 0.0])


def test_a_step_by_hand():
    """x = (1, 0), y = (1, 1): sigma is 1/2, so half of y is added."""
    transition = LazyTransition(Fixed(torch.tensor([1.0, 1.0])))
    state, gate, *_ = transition.step(torch.tensor([[1.0, 0.0]]))
    assert gate.item() == pytest.approx(0.5)
    assert state.tolist() == [pytest.approx([1.5, 0.5])]
    assert torch.allclose(transition(torch.tensor([[1.0, 0.0]])), state)


def test_a_step_compared_with_the_state_it_would_make_by_hand():
    """x = (1, 0), y = (0, 1): the state would turn by 45 degrees, so half of the way is made."""
    transition = LazyTransition(Fixed(torch.tensor([0.0, 1.0])), compare="state")
    state, gate, *_ = transition.step(torch.tensor([[1.0, 0.0]]))
    assert gate.item() == pytest.approx(0.5)
    assert state.tolist() == [pytest.approx([1.0, 0.5])]
    small = LazyTransition(Fixed(torch.tensor([0.0, 0.01])), compare="state")
    assert small.step(torch.tensor([[1.0, 0.0]])).gate.item() == pytest.approx(1e-4, rel=1e-3)


def test_the_papers_norm_comes_after_the_update():
    transition = LazyTransition(Fixed(torch.tensor([1.0, 1.0])), norm=nn.LayerNorm(2))
    state = transition(torch.tensor([[1.0, 0.0]]))
    assert state[0].tolist() == pytest.approx([1.0, -1.0], abs=1e-4)  # of (1.5, 0.5)


def test_without_laziness_it_is_a_residual_connection():
    transition = LazyTransition(Fixed(torch.tensor([1.0, 1.0])), lazy=False)
    state, gate, *_ = transition.step(torch.tensor([[1.0, 0.0]]))
    assert state.tolist() == [[2.0, 1.0]]
    assert gate.tolist() == [1.0]


vectors = st.lists(st.floats(-100, 100), min_size=5, max_size=5).filter(
    lambda values: math.hypot(*values) > 1e-3
)


@given(vectors, vectors)
def test_squared_cosine_is_the_literal_cka(x, y):
    a, b = torch.tensor(x, dtype=torch.double), torch.tensor(y, dtype=torch.double)
    literal = float(linear_cka_ref(a, b))
    assert float(squared_cosine(a, b)) == pytest.approx(literal, abs=1e-9)


def test_zero_vectors_are_not_similar_and_large_ones_do_not_overflow():
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert squared_cosine(zero, one).tolist() == [0.0]
    assert squared_cosine(one, zero).tolist() == [0.0]
    assert squared_cosine(1e15 * one, 1e12 * one).tolist() == pytest.approx([1.0])


def test_no_gradient_goes_through_the_gate():
    update = torch.tensor([1.0, 1.0])
    transition = LazyTransition(Fixed(update))
    transition(torch.tensor([[1.0, 0.0]])).sum().backward()
    # With the gate a constant 1/2, the derivative of each channel's sum is just that.
    assert transition.block.update.grad.tolist() == pytest.approx([0.5, 0.5])


def test_dropout_acts_on_the_update_and_not_on_the_gate():
    torch.manual_seed(0)
    transition = LazyTransition(Fixed(torch.ones(1000)), dropout=0.5)
    start = torch.zeros(1, 1000)
    start[0, 0] = 1.0
    state, gate, *_ = transition.step(start)
    assert gate.item() == pytest.approx(1 - 1 / 1000)
    moved = (state - start)[0] / gate
    assert set(moved.round(decimals=3).tolist()) == {0.0, 2.0}
    assert 400 < int((moved > 1).sum()) < 600
    transition.eval()
    assert torch.allclose(transition(start), start + gate)


def test_step_similarity_is_of_consecutive_states():
    states = [torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 1.0]]]), torch.ones(1, 1, 2) * 7]
    assert step_similarity(states).flatten().tolist() == pytest.approx([0.5, 1.0])


def test_any_block_can_be_made_lazy():
    torch.manual_seed(0)
    transition = LazyTransition(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), dropout=0.1)
    state = torch.randn(2, 3, 8)
    for _ in range(4):
        state = transition(state)
    state.sum().backward()
    assert all(parameter.grad is not None for parameter in transition.parameters())


def test_noise_is_taken_out_of_the_products_by_hand():
    """x = (1, 0) and e = (0, 1): without e the state would not turn, with it by 18 degrees."""
    noisy, update, noise = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.ones(1)
    assert update_gate(noisy, update, "state").item() == pytest.approx(0.1)
    assert update_gate(noisy, update, "state", noise).item() == pytest.approx(0.0, abs=1e-6)
    assert update_gate(noisy, update, "update").item() == pytest.approx(0.5)
    assert update_gate(noisy, update, "update", noise).item() == pytest.approx(0.0, abs=1e-6)
    # More than there is: nothing is known of such a state, and it is left where it is.
    assert update_gate(noisy, update, "state", 9 * noise).item() == 0.0


@pytest.mark.parametrize("compare", ["state", "update"])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(512, elementwise_affine=False)])
def test_gates_without_noise_are_those_of_evaluation(compare, norm):
    """Two steps of a block whose updates are mostly more of the same, as trained ones are."""
    torch.manual_seed(0)
    clean = torch.randn(1, 512)
    update = 1.5 * clean[0] + torch.randn(512)
    transition = LazyTransition(Fixed(update), norm, dropout=0.3, compare=compare).eval()
    gates = []
    for _ in range(2):
        clean, gate, *_ = transition.step(clean)
        gates.append(gate.item())
    torch.manual_seed(0)
    start = torch.randn(1, 512).expand(2000, 512)
    transition.train()
    plain = freed = transition.dropout(start)
    noise = dropout_noise(plain, 0.3)
    for wanted in gates:
        plain, biased, *_ = transition.step(plain)
        freed, found, noise, _ = transition.step(freed, noise=noise)
        assert abs(float(biased.mean()) - wanted) > 0.03, "without noise nothing is shown"
        assert float(found.mean()) == pytest.approx(wanted, abs=0.012)


def test_the_cka_of_a_sentence_is_the_literal_formula_over_its_tokens():
    """`|Y^T X|^2 / (|X^T X| |Y^T Y|)`, columns centred (arXiv 1905.00414, eq. 3)."""
    torch.manual_seed(0)
    states = [torch.randn(7, 5, dtype=torch.float64) for _ in range(3)]
    states.append(states[0] @ torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q * 3 + 1)
    found = step_cka(states)
    for i, first in enumerate(states):
        for j, second in enumerate(states):
            x, y = first - first.mean(0), second - second.mean(0)
            parts = [torch.linalg.matrix_norm(a.T @ b) for a, b in ((y, x), (x, x), (y, y))]
            assert found[i, j].item() == pytest.approx((parts[0] ** 2 / parts[1] / parts[2]).item())
    assert found[0, 3].item() == pytest.approx(1.0)  # a rotation, scaled and moved
    assert 0.0 < found[0, 1].item() < 0.9


def test_the_cka_of_one_token_is_that_of_its_gate():
    states = [torch.randn(1, 5, dtype=torch.float64) for _ in range(2)]
    assert step_cka(states)[0, 1].item() == pytest.approx(
        squared_cosine(states[0], states[1]).item()
    )


def published_cka(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The authors' lines of `cka.py`, from TensorFlow into torch and nothing else."""
    x, y = x.unsqueeze(-1), y.unsqueeze(-1)
    dot_product_similarity = (x.mT @ y).norm(dim=-1) ** 2
    normalization_x = (x.mT @ x).norm(dim=-1)
    normalization_y = (y.mT @ y).norm(dim=-1)
    return dot_product_similarity / (normalization_x * normalization_y)


def test_a_step_is_the_published_call():
    """`output_norm(x + (1 - halting_pro) * y)` with `y = layer(x)`, outside training."""
    torch.manual_seed(0)
    layer, output_norm = nn.Linear(6, 6).double(), nn.LayerNorm(6).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y = layer(x)
    halting_pro = published_cka(x, y)
    expected = output_norm(x + (1 - halting_pro) * y)
    found = LazyTransition(layer, output_norm, dropout=0.1).eval().step(x)
    assert torch.allclose(found.state, expected, atol=1e-12)
    assert torch.allclose(1 - found.gate, halting_pro.squeeze(-1), atol=1e-12)
