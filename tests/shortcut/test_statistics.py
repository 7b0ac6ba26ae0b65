"""Sums over positions: right whatever the batches, the pairs and the order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut import statistics as module
from deepenough.shortcut.fitting import (
    make_plan,
    num_blocks,
    pairs_of,
    plan_bytes,
    split_plan,
)
from deepenough.shortcut.statistics import LayerStatistics, NormalEquations, Plan


def assert_sums(statistics: LayerStatistics, states: list[Tensor]) -> None:
    statistics.finish()
    assert statistics.count == len(states[0])
    torch.testing.assert_close(statistics.sums, torch.stack([h.sum(0) for h in states]))
    for i, targets in statistics.plan.items():
        torch.testing.assert_close(statistics.gram(i), states[i].T @ states[i])
        for j in targets:
            torch.testing.assert_close(statistics.cross(i, j), states[i].T @ states[j])


def test_one_map_by_hand() -> None:
    """y = 2x + 1 at x = 0, 1, 2: through the origin 13/5, with an intercept the line itself."""
    equations = NormalEquations(1, 1)
    equations.update(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [3.0]]))
    equations.update(torch.tensor([[2.0]]), torch.tensor([[5.0]]))
    linear = equations.solve()
    assert linear.weight.item() == pytest.approx(13 / 5) and linear.bias is None
    affine = equations.solve(affine=True)
    assert affine.bias is not None
    assert (affine.weight.item(), affine.bias.item()) == (pytest.approx(2.0), pytest.approx(1.0))
    # X^T X = 5 and X^T Y = 13: a penalty of 2, and one of 2 times the sum of squares.
    assert equations.solve(ridge=2.0).weight.item() == pytest.approx(13 / 7)
    assert equations.solve(ridge=2.0, relative=True).weight.item() == pytest.approx(13 / 15)


@pytest.mark.parametrize("affine", [False, True])
def test_equations_are_least_squares(states: list[Tensor], affine: bool) -> None:
    """More outputs than inputs, in batches that are not as large as what waits."""
    x, y = states[0], torch.cat([states[1], states[2][:, :3]], dim=1)
    equations = NormalEquations(6, 9)
    for start in range(0, 700, 90):
        equations.update(x[start : start + 90], y[start : start + 90])
    found = equations.solve(affine)
    model = LinearRegression(fit_intercept=affine).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(found.weight, model.coef_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found(x), model.predict(x.numpy()), rtol=1e-8, atol=1e-8)
    assert equations.count == 700
    few = NormalEquations(6, 9)
    few.update(x[:5], y[:5])
    with pytest.raises(UserError, match="at least 6 positions"):
        few.solve()


PLANS: list[Plan] = [
    make_plan(3, "all"),
    make_plan(3, "last"),
    {0: (1, 3), 2: (3,)},
    {1: (), 0: (2, 3)},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("panel", [1, 4, 6, 100])
def test_sums_of_uneven_batches(
    states: list[Tensor], plan: Plan, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PANEL", panel)
    statistics = LayerStatistics(3, 6, plan)
    start = 0
    for size in (1, 31, 32, 0, 200, 436):  # the buffer holds 32 rows
        statistics.update([h[start : start + size] for h in states])
        start += size
    assert start == 700
    assert_sums(statistics, states)


def test_a_case_by_hand() -> None:
    statistics = LayerStatistics(1, 2, make_plan(1))
    statistics.update([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])])
    statistics.update([torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])])
    statistics.finish()
    assert statistics.gram(0).tolist() == [[1.0, 2.0], [2.0, 5.0]]
    assert statistics.cross(0, 1).tolist() == [[3.0, 4.0], [7.0, 8.0]]
    assert statistics.sums.tolist() == [[1.0, 3.0], [4.0, 4.0]]


def test_a_state_goes_on_with_the_same_bits(states: list[Tensor]) -> None:
    whole, first, second = (LayerStatistics(3, 6, make_plan(3)) for _ in range(3))
    first.update([h[:77] for h in states])
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    assert second.count == 77
    second.update([h[77:] for h in states])
    for part in (slice(0, 77), slice(77, 700)):
        whole.update([h[part] for h in states])
    for name, value in whole.finish().state_dict().items():
        assert torch.equal(value, second.finish().state_dict()[name]), name
    with pytest.raises(ValueError, match="another shape"):
        LayerStatistics(3, 5, make_plan(3)).load_state_dict(whole.state_dict())


def test_the_buffer_is_bounded_and_given_back() -> None:
    statistics = LayerStatistics(12, 64, make_plan(12))
    statistics.update([torch.randn(5000, 64) for _ in range(13)])
    assert statistics._buffer is not None
    assert statistics._buffer.nbytes <= 0.2 * statistics.nbytes
    assert statistics.finish()._buffer is None


def test_states_of_another_shape_are_refused(states: list[Tensor]) -> None:
    statistics = LayerStatistics(3, 6, make_plan(3))
    for wrong, said in (
        (states[:3], "3 states of width 6 do not fit"),
        ([h[:, :5] for h in states], "width 5 do not fit"),
        ([*states[:3], states[3][:9]], "layer 3 have the shape"),
        ([states[0]], "at least two layers"),
    ):
        with pytest.raises(UserError, match=said):
            statistics.update(wrong)


def test_plans() -> None:
    assert make_plan(2) == {0: (1, 2), 1: (2,), 2: ()}
    assert make_plan(2, "last") == {0: (2,), 1: (2,), 2: ()}
    assert num_blocks(make_plan(12)) == 91
    assert plan_bytes(make_plan(12), 768) == 91 * 768 * 768 * 8
    with pytest.raises(UserError, match="choose 'all' or 'last'"):
        make_plan(2, "first")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least two layers"):
        make_plan(0)


@given(st.integers(1, 9), st.sampled_from(["all", "last"]), st.integers(2, 60))
def test_passes_hold_every_pair_once_within_the_limit(layers: int, targets: str, room: int) -> None:
    plan = make_plan(layers, targets)  # type: ignore[arg-type]
    block = 4 * 4 * 8 * 1.3
    passes = split_plan(plan, 4, room * block + 1)
    assert sorted(pair for part in passes for pair in pairs_of(part)) == sorted(pairs_of(plan))
    assert all(num_blocks(part) <= room for part in passes)
    assert {source for part in passes for source in part} == set(plan)
    if room >= num_blocks(plan):
        assert passes == [plan]


def test_a_limit_below_one_map_says_what_is_needed() -> None:
    with pytest.raises(UserError, match=r"at least 53 MB"):
        split_plan(make_plan(2), 1600, 3e7)
