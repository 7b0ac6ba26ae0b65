"""The linear map equals torch's for any number of rows, and takes its short cut where it should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepenough.nn import linear
from deepenough.nn.linear import FEW, WIDE, Linear


def maps(bias: bool) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours, theirs = Linear(WIDE, 24, bias=bias), nn.Linear(WIDE, 24, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (16,), (4, 4), (2, 3, 8), (48,), (49,), (5, 20)])
def test_equal_to_torchs(shape: tuple[int, ...], bias: bool) -> None:
    ours, theirs = maps(bias)
    rows = torch.randn(*shape, WIDE)
    with torch.no_grad():
        made = ours(rows)
        torch.testing.assert_close(made, theirs(rows), rtol=1e-4, atol=1e-5)
    assert made.is_contiguous()


def test_few_rows_go_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def products() -> int:
        calls.clear()
        ours(rows)
        return len(calls)

    calls: list[int] = []
    monkeypatch.setattr(linear.torch, "mm", lambda a, b: calls.append(1) or a.matmul(b))
    ours, _ = maps(bias=False)
    rows = torch.randn(FEW[0], WIDE)
    assert products() == 0, "a training keeps to torch's own map"
    with torch.no_grad():
        assert products() == 1
        rows = torch.randn(FEW[0] - 1, WIDE)
        assert products() == 0
        ours, rows = Linear(8, 4, bias=False), torch.randn(FEW[0], 8)
        assert products() == 0


def test_it_learns_as_torchs_does() -> None:
    ours, theirs = maps(bias=True)
    rows = torch.randn(FEW[0], WIDE)
    for module in (ours, theirs):
        module(rows).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
