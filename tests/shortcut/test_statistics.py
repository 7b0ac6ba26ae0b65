"""Sums over positions: right whatever the batches, the pairs and the order."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut import normal_equations
from deepenough.shortcut.normal_equations import NormalEquations
from deepenough.shortcut.statistics import (
    LayerStatistics,
    layer_pairs,
    layer_targets,
    statistics_bytes,
)


def assert_sums(statistics: LayerStatistics, states: list[Tensor]) -> None:
    statistics.flush()
    assert statistics.count == len(states[0])
    for i, targets in statistics.target_layers.items():
        equations = statistics.equations[i]
        own = torch.cat([states[i], *(states[j] for j in targets)], dim=1)
        assert equations.count == len(own)
        torch.testing.assert_close(equations.sums, own.sum(0))
        torch.testing.assert_close(equations.moments(centred=False)[0], states[i].T @ states[i])
        torch.testing.assert_close(equations.moments(centred=False)[1], states[i].T @ own[:, 6:])


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


@pytest.mark.parametrize("targets", ["all", "last"])
@pytest.mark.parametrize("panel", [1, 4, 6, 100])
def test_sums_of_uneven_batches(
    states: list[Tensor], targets: Any, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normal_equations, "_PANEL", panel)
    statistics = LayerStatistics(3, 6, targets)
    start = 0
    for size in (1, 31, 32, 0, 200, 436):  # the buffer holds 32 rows
        statistics.update([h[start : start + size] for h in states])
        start += size
    assert start == 700
    assert_sums(statistics, states)


def test_a_case_by_hand() -> None:
    statistics = LayerStatistics(1, 2)
    statistics.update([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])])
    statistics.update([torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])])
    statistics.flush()
    equations = statistics.equations[0]
    assert equations.moments(centred=False)[0].tolist() == [[1.0, 2.0], [2.0, 5.0]]
    assert equations.moments(centred=False)[1].tolist() == [[3.0, 4.0], [7.0, 8.0]]
    assert equations.sums.tolist() == [1.0, 3.0, 4.0, 4.0]
    # Centred, the two rows are half their difference, once with each sign: (1, 1) and (2, 4).
    gram, cross = equations.moments(centred=True)
    assert gram.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert cross.tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_a_state_goes_on_with_the_same_bits(states: list[Tensor]) -> None:
    whole, first, second = (LayerStatistics(3, 6) for _ in range(3))
    first.update([h[:77] for h in states])
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    assert second.count == 77
    second.update([h[77:] for h in states])
    for part in (slice(0, 77), slice(77, 700)):
        whole.update([h[part] for h in states])
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    with pytest.raises(ValueError, match="another shape"):
        LayerStatistics(3, 5).load_state_dict(whole.state_dict())


def test_the_buffer_is_bounded() -> None:
    statistics = LayerStatistics(12, 64)
    assert statistics._buffer.nbytes <= 0.2 * statistics_bytes(12, 64)


def test_states_of_another_shape_are_refused(states: list[Tensor]) -> None:
    statistics = LayerStatistics(3, 6)
    for wrong, said in (
        (states[:3], "3 states of width 6 do not fit"),
        ([h[:, :5] for h in states], "width 5 do not fit"),
        ([*states[:3], states[3][:9]], "layer 3 have the shape"),
        ([states[0]], "at least two layers"),
    ):
        with pytest.raises(UserError, match=said):
            statistics.update(wrong)


def test_targets() -> None:
    assert {i: list(own) for i, own in layer_targets(2).items()} == {0: [1, 2], 1: [2], 2: []}
    assert layer_pairs(2, "last") == {(0, 2), (1, 2)}
    assert statistics_bytes(12, 768) == 91 * 768 * 768 * 8
    assert statistics_bytes(12, 768, "last") == 25 * 768 * 768 * 8
    with pytest.raises(UserError, match="choose 'all' or 'last'"):
        layer_targets(2, "first")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least two layers"):
        layer_targets(0)
