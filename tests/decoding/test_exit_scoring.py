"""Exits over whole texts: the logits that decoding would have had, and which exits pay."""

from itertools import combinations

import pytest
import torch

from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.early_exit import (
    KV_PROPAGATIONS,
    ConfidenceGap,
    FixedLayer,
    TopProbability,
)
from deepenough.decoding.engine import make_engine
from deepenough.decoding.exit_scoring import grow_exits, mean_cost, write_planning_texts


def test_a_cost_by_hand() -> None:
    """Leaving after the first exit costs 13, after the second 22, never 45; a check 3."""
    leaves = torch.tensor([[True, False, False, True], [True, True, False, True]])
    right = torch.tensor([[True, False, False, False], [True, True, False, True]])
    # The last one leaves at the first exit and is wrong: the whole way, after one check.
    each = [13 + 3, 22 + 6, 45 + 6, 45 + 3]
    assert mean_cost(leaves, right, [13, 22, 45], 3) == pytest.approx(sum(each) / 4)
    # Asked at the second alone, it is right.
    each = [22 + 3, 22 + 3, 45 + 3, 22 + 3]
    assert mean_cost(leaves[1:], right[1:], [22, 45], 3) == pytest.approx(sum(each) / 4)


@pytest.mark.parametrize("seed", range(5))
def test_grown_exits_are_close_to_the_best(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = list(range(1, 8))
    ease = torch.rand(200, generator=generator)
    leaves = torch.stack([ease < layer / 9 for layer in layers])
    right = leaves & (torch.rand(7, 200, generator=generator) < 0.95)

    def cost(exits):
        rows = [layers.index(layer) for layer in exits]
        ends = [*(1 + layer + 0.1 * (8 - layer) for layer in exits), 9]
        return mean_cost(leaves[rows], right[rows], ends, 0.3)

    every = [list(s) for n in range(1, 8) for s in combinations(layers, n)]
    best = min(cost(exits) for exits in every)
    assert cost(grow_exits(cost, layers)) <= 1.03 * best


def test_dear_checks_leave_one_exit() -> None:
    assert grow_exits(lambda exits: 100.0 * len(exits), [1, 2, 3]) == [1]


def test_planning_texts_are_the_same_every_time(small) -> None:
    engine = make_engine(small)
    ids = write_planning_texts(engine)
    assert ids.shape == (8, 24)
    assert torch.equal(ids, write_planning_texts(engine))


def test_exits_are_chosen_where_none_are_given(make_model, shortcuts) -> None:
    for name in ("llama", "opt"):
        fast = early_exit(make_model(name), shortcuts, policy=FixedLayer(2))
        assert set(fast.exit_rule.layers) <= {1, 2}
        again = early_exit(make_model(name), shortcuts, policy=FixedLayer(2))
        assert again.exit_rule.layers == fast.exit_rule.layers


# -- a plain call of an exiting model ---------------------------------------------------------

WAYS = [
    *(("llama", fill) for fill in KV_PROPAGATIONS),
    *((name, "shortcut") for name in ("gpt2", "gpt_neox", "opt")),
]


@pytest.mark.parametrize(("name", "fill"), WAYS)
def test_one_pass_is_decoding(make_model, shortcuts, name, fill) -> None:
    """Generate from one token on, then give the text back: logits and depths are the same."""
    options = {"policy": ConfidenceGap(0.2, 8), "exit_layers": [1, 2], "kv_propagation": fill}
    fast = early_exit(make_model(name), shortcuts, **options)
    start = torch.tensor([[5]])
    output = fast.generate(
        start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=14,
        min_new_tokens=14, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert 1 < output.trace.mean_depth < 3
    logits = fast(output.sequences).logits[0, :-1]
    assert torch.allclose(logits, torch.cat(output.logits), atol=1e-4)
    assert torch.equal(fast.trace.depth[:, :-1], output.trace.depth)
    assert torch.allclose(fast.trace.flops[0, 1:-1], output.trace.flops[0, 1:], rtol=0.05)


def test_padding_changes_nothing(small, shortcuts) -> None:
    fast = early_exit(small, shortcuts, policy=TopProbability(0.3), exit_layers=[1, 2])
    ids = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    alone = fast(ids).logits
    depth = fast.trace.depth
    zeros = torch.zeros(1, 3, dtype=torch.long)
    for padded, mask, kept in (
        (torch.cat([ids, zeros], 1), torch.tensor([[1] * 9 + [0] * 3]), slice(0, 9)),
        (torch.cat([zeros, ids], 1), torch.tensor([[0] * 3 + [1] * 9]), slice(3, 12)),
    ):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        found = fast(padded, attention_mask=mask, position_ids=positions).logits[:, kept]
        assert torch.allclose(found, alone, atol=1e-4)
        assert torch.equal(fast.trace.depth[:, kept], depth)
        assert fast.trace.depth[mask == 0].sum() == 0


def test_a_mask_may_come_second(small, shortcuts) -> None:
    fast = early_exit(small, shortcuts, policy=TopProbability(0.3), exit_layers=[1, 2])
    ids, mask = torch.arange(3, 12)[None], torch.tensor([[0] * 3 + [1] * 6])
    expected = fast(ids, attention_mask=mask).logits
    torch.testing.assert_close(fast(ids, mask).logits, expected)
    assert fast.trace.depth[mask == 0].sum() == 0


def test_what_never_leaves_is_the_models_own(small, shortcuts) -> None:
    ids = torch.arange(3, 15)[None]
    expected = small(ids, labels=ids)
    for fill in KV_PROPAGATIONS:
        options = {"policy": TopProbability(1.0), "exit_layers": [1, 2], "kv_propagation": fill}
        found = early_exit(small, shortcuts, **options)(ids, labels=ids)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss)


def test_losses_are_those_of_the_exits(small, shortcuts) -> None:
    ids = torch.arange(3, 15)[None]
    options = {"policy": FixedLayer(1), "exit_layers": [1], "kv_propagation": "copy"}
    fast = early_exit(small, shortcuts, **options)
    output = fast(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert fast.trace.depth.tolist() == [[3] + [1] * 11]
    assert not torch.allclose(output.logits, small(ids).logits, atol=1e-2)


def test_speculation_has_the_models_own_forward(small) -> None:
    ids = torch.arange(3, 15)[None]
    for drafter in ("none", "lookup"):
        torch.testing.assert_close(speculate(small, drafter)(ids).logits, small(ids).logits)
