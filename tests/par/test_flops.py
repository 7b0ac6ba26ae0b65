"""The closed form of the FLOPs against torch's own counter, on every form of the model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from deepenough.par.flops import branch_flops, embedding_flops, head_flops

FORMS = [
    {"pattern": "a"},
    {"pattern": "d"},
    {"pattern": "aad-d"},
    {"num_blocks": 3},
    {"pattern": "a*-d"},
    {"pattern": "ad", "cutoffs": [10, 20]},
    {"num_blocks": 2, "cutoffs": [10, 20], "adaptive_input": True},
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
@pytest.mark.parametrize("lanes", [1, 3])  # few queries take another way to the positions
def test_trace_equals_torchs_counter_along_a_stream(make_model, form, lanes):
    model = make_model(**form)
    memories = None
    for _ in range(3):
        ids, targets = torch.randint(0, 40, (2, lanes, 5))
        output, expected = count(model, ids, targets=targets, memories=memories)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
        output, expected = count(model, ids, memories=memories)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
        memories = output.memories


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("lanes", [1, 3])
def test_trace_equals_torchs_counter_in_generation(make_model, form, lanes):
    model = make_model(**form)
    cache = DynamicCache(config=model.config)
    window = model.config.sliding_window
    for num_new in (6, 1, 2, *[1] * window):
        ids = torch.randint(0, 40, (lanes, num_new))
        output, expected = count(model, ids, past_key_values=cache, logits_to_keep=1)
        assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)


def test_decided_blocks_cost_their_branch_alone(make_model):
    model = make_model(num_blocks=3)
    ids = torch.randint(0, 40, (3, 5))
    model.decide(0, "a")
    model.decide(1, "d")
    model.decide(2, "-")
    output, expected = count(model, ids)
    assert output.trace.total_flops == pytest.approx(expected, rel=1e-12)
    assert expected == count(make_model(pattern="ad-"), ids)[1]


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


def test_embedding_by_hand(make_config):
    ids = torch.tensor([[9, 10], [19, 20]])
    assert embedding_flops(make_config(cutoffs=[10, 20]), ids).tolist() == [0] * 4
    config = make_config(cutoffs=[10, 20], adaptive_input=True)
    assert embedding_flops(config, ids).tolist() == [0, 2 * 8 * 16, 2 * 8 * 16, 2 * 4 * 16]


def test_cached_keys_are_not_projected_again(make_config):
    config = make_config()
    saved = branch_flops(config, "a", 1, 1, 9) - branch_flops(config, "a", 1, 1, 9, projected=1)
    assert saved == 2 * 8 * 2 * 16 * 16
