"""Exits over whole texts: the logits that decoding would have had, and which exits pay."""

import pytest
import torch

from deepenough import Shortcuts
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.early_exit import (
    KV_PROPAGATIONS,
    ConfidenceGap,
    FixedLayer,
    TopProbability,
)
from deepenough.decoding.exit_scoring import write_planning_texts
from deepenough.hf.adapter import adapt


def test_planning_texts_are_the_same_every_time(small) -> None:
    engine = make_engine(small)
    ids = write_planning_texts(engine)
    assert ids.shape == (8, 24)
    assert torch.equal(ids, write_planning_texts(engine))


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("wanted", [1, 2])
def test_the_exit_is_where_most_is_saved(make_model, name, wanted) -> None:
    """Every token leaves at every layer, but rightly only where later layers change nothing."""
    model = make_model(name)
    for layer in adapt(model).layers[wanted:]:
        for parameter in layer.parameters():
            parameter.zero_()
    eye = torch.eye(32)
    same = Shortcuts(3, 32, {(i, j): eye for i in range(3) for j in range(i + 1, 4)})
    fast = early_exit(model, same, policy=TopProbability(0.0))
    assert fast.exit_rule.layers == [wanted]


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


def test_embeddings_leave_as_their_tokens_do(small, prompts, shortcuts) -> None:
    fast = early_exit(small, shortcuts, policy=FixedLayer(1), exit_layers=[1])
    given = prompts(3)
    embeddings = small.get_input_embeddings()(given["input_ids"])
    mask = given["attention_mask"]
    expected = fast(**given).logits
    assert not torch.allclose(expected, small(**given).logits, atol=1e-2)
    assert torch.equal(fast(inputs_embeds=embeddings, attention_mask=mask).logits, expected)
