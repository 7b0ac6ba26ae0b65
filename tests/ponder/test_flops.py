"""The closed form of the FLOPs against torch's own counter, with examples that leave."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepenough.ponder.flops import linear_flops
from deepenough.ponder.policies import FixedExit, QuantileExit, SampledExit

ARCHITECTURES = ("bert", "roberta", "mpnet", "distilbert", "electra", "modernbert", "albert")


def count(model, batch, policy):
    """Output and FLOPs; the counter does not know the CPU's fused attention, hence the plain."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = model(**batch, policy=policy)
    return output, counter.get_total_flops()


@pytest.mark.parametrize("policy", [QuantileExit(0.5), FixedExit()], ids=["quantile", "fixed"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_trace_equals_torchs_counter(make_model, batch, kind, policy):
    model = make_model(kind)
    model(**batch)  # the first call also learns what layers return
    output, expected = count(model, batch, policy)
    assert output.trace.total_flops == expected


@pytest.mark.parametrize("halting_head", ["previous", "second_cls"])
def test_trace_of_albert(make_albert, batch, halting_head):
    model = make_albert(num_passes=7, halting_head=halting_head)
    model(**batch)
    output, expected = count(model, batch, SampledExit(3))
    assert output.trace.total_flops == expected
    assert len(output.passes.unique()) > 1
    assert output.trace.ran.shape == (9, 7)
    assert torch.equal(output.trace.ran.sum(-1), output.passes)
    assert torch.equal(output.trace.depth, output.passes)


def test_by_hand(make_model):
    model = make_model(objective="last", exit="fixed", encoder={"num_hidden_layers": 2})
    ids = torch.full((1, 5), 7)
    maps = 4 * 16 * 16 + 2 * 16 * 24
    layer = 5 * 2 * maps + 2 * 2 * 5 * 5 * 16
    head = 2 * (16 * 16 + 16 * 3)
    assert model(ids).trace.flops.tolist() == [2 * (layer + head)]
    assert linear_flops(model.stack.layers[0]) == 2 * maps
