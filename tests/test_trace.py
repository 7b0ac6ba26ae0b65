"""`DepthTrace`: the sums and means that measuring reads from it."""

import pytest
import torch

from deepenough import DepthTrace


def make_trace(**changes) -> DepthTrace:
    """Two examples of two tokens on three blocks; the last token skips the middle block."""
    values = {
        "depth": torch.tensor([[3, 3], [1, 3]]),
        "ran": torch.tensor([[[1, 1, 0], [1, 1, 0]], [[1, 0, 0], [1, 0, 0]]]).bool(),
        "flops": torch.tensor([[10.0, 20.0], [5.0, 7.5]]),
    }
    return DepthTrace(**(values | changes))


def test_values_by_hand():
    trace = make_trace()
    assert trace.num_units == 4
    assert trace.total_flops == 42.5
    assert trace.mean_depth == 2.5
    assert trace.mean_blocks == 1.5


def test_units_may_be_examples():
    ran = torch.tensor([[True, False], [True, True]])
    trace = DepthTrace(torch.tensor([1, 2]), ran, torch.tensor([1.0, 2.0]))
    assert (trace.num_units, trace.mean_blocks) == (2, 1.5)


def test_a_part_of_the_units():
    trace = make_trace()
    assert trace[1].depth.tolist() == [1, 3]
    assert trace[:1].total_flops == 30
    assert trace[torch.tensor([False, True])].ran.shape == (1, 2, 3)
    assert trace[0][1].num_units == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": torch.zeros(2)}, "of one shape"),
        ({"flops": torch.zeros(2, 3)}, "of one shape"),
        ({"ran": torch.zeros(2, 2).bool()}, "of one shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_trace(**changes)


def test_join_puts_the_units_of_batches_in_a_row():
    other = DepthTrace(torch.tensor([2]), torch.tensor([[True, True, False]]), torch.tensor([1.5]))
    joined = DepthTrace.join([make_trace(), other])
    assert joined.depth.tolist() == [3, 3, 1, 3, 2]
    assert joined.ran.shape == (5, 3)
    assert joined.total_flops == 44.0


def test_join_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no trace"):
        DepthTrace.join([])


def test_one_unit_is_a_trace_too():
    ran = torch.tensor([[True, False], [True, True]])
    trace = DepthTrace(torch.tensor([1, 2]), ran, torch.tensor([3.0, 4.0]))
    assert (trace[0].total_flops, trace[1].total_flops) == (3.0, 4.0)
    joined = DepthTrace.join([trace[0], trace[1]])
    assert torch.equal(joined.ran, ran) and joined.depth.tolist() == [1, 2]
