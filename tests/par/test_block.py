"""One block: the mixture as the paper's formula reads, and what each kind leaves out."""

import pytest
import torch
import torch.nn.functional as F

from deepenough.par.block import ParBlock
from deepenough.par.config import ParConfig
from deepenough.par.context import Context, Contexts
from deepenough.par.pattern import IDENTITY, OPEN


def make_block(config, kind: str) -> tuple[ParBlock, Context, torch.Tensor]:
    torch.manual_seed(0)
    block = ParBlock(config, kind).eval()
    hidden = torch.randn(3, 5, config.d_model)
    context = Contexts(config).get(5, 5, hidden, None)
    return block, context, hidden


def test_open_block_is_the_weighted_sum_of_three_residual_branches(make_config):
    block, context, hidden = make_block(make_config(), OPEN)
    normed = F.layer_norm(hidden, (16,))
    key, value = block.attention.keys_values(normed)
    attended = hidden + block.attention(normed, key, value, context.codes, context.mask)
    dense = hidden + block.dense.down(block.dense.up(normed).relu())
    weights = torch.rand(3, 3).softmax(-1)
    w_a, w_d, w_i = weights.T[..., None, None]
    expected = w_a * attended + w_d * dense + w_i * hidden
    torch.testing.assert_close(block(hidden, context, weights_B3=weights)[0], expected)


def test_identity_returns_what_it_got(make_config):
    block, context, hidden = make_block(make_config(), IDENTITY)
    assert block(hidden, context)[0] is hidden
    assert not list(block.parameters())


@pytest.mark.parametrize("kind", ["a", "d", "*"])
def test_every_new_state_comes_with_the_normalised_old_one(make_config, kind):
    block, context, hidden = make_block(make_config(), kind)
    new, normed = block(hidden, context, weights_B3=torch.ones(3, 3) if kind == OPEN else None)
    assert not torch.equal(new, hidden)
    torch.testing.assert_close(normed, F.layer_norm(hidden, (16,)))


def test_dropout_falls_on_the_update_alone(make_config):
    block, context, hidden = make_block(make_config(dropout=0.5), "d")
    full = block(hidden, context)[0] - hidden
    block.train()
    update = block(hidden, context)[0] - hidden
    dropped = update.abs() < 1e-6
    assert 0.3 < float(dropped.float().mean()) < 0.7
    torch.testing.assert_close(update[~dropped], 2 * full[~dropped], atol=1e-5, rtol=1e-5)


def test_contexts_are_made_once_and_not_kept_for_ever(make_config):
    config = make_config()
    contexts = Contexts(config)
    like = torch.zeros(())
    assert contexts.get(3, 5, like, None) is contexts.get(3, 5, like, torch.ones(2, 5))
    assert contexts.get(3, 5, like.double(), None).mask.dtype == torch.float64
    for length in range(1, 200):
        contexts.get(length, length, like, None)
    assert len(contexts._known) <= 65


def test_padding_is_counted_from_the_newest_key():
    contexts = Contexts(ParConfig(d_model=16, length=5, mem_len=4))
    lowest = torch.finfo(torch.float32).min
    # Six keys: two of memory, which the mask of four does not know, then padding, then text.
    mask = contexts.get(4, 6, torch.zeros(()), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])).mask
    assert mask.shape == (2, 1, 4, 6)
    assert mask[0, 0, 3].tolist() == [0, 0, lowest, 0, 0, 0]
    assert mask[1, 0, 0].tolist() == [0, 0, 0, lowest, lowest, lowest]
    assert mask.isfinite().all()
