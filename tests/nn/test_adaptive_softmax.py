"""Embeddings: the adaptive form against a loop over tokens."""

import pytest
import torch

from deepenough.nn.adaptive_softmax import (
    AdaptiveEmbedding,
    adaptive_embedding_ref,
    cluster_width,
)

CUTOFFS = [4, 10]


@pytest.fixture
def module() -> AdaptiveEmbedding:
    torch.manual_seed(0)
    return AdaptiveEmbedding(vocab_size=25, width=16, cutoffs=CUTOFFS, factor=4.0)


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 1, 4)])
def test_equals_the_loop_over_tokens(module, shape):
    ids = torch.randint(0, 25, shape)
    torch.testing.assert_close(module(ids), adaptive_embedding_ref(module, ids))


def test_every_token_and_its_gradient(module):
    ids = torch.cat([torch.arange(25), torch.tensor([3, 4, 9, 10, 24, 4])])
    weights = torch.randn(len(ids), 16)
    wanted = list(module.parameters())
    fast = torch.autograd.grad((module(ids) * weights).sum(), wanted)
    slow = torch.autograd.grad((adaptive_embedding_ref(module, ids) * weights).sum(), wanted)
    for got, expected in zip(fast, slow, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_batch_may_lack_a_cluster(module):
    ids = torch.tensor([[5, 6], [9, 4]])
    torch.testing.assert_close(module(ids), adaptive_embedding_ref(module, ids))


def test_rare_tokens_have_narrow_tables(module):
    shapes = [tuple(table.weight.shape) for table in module.tables]
    assert shapes == [(4, 16), (6, 4), (15, 1)]
    assert [cluster_width(16, 4.0, cluster) for cluster in range(3)] == [16, 4, 1]


@pytest.mark.parametrize("token", [-1, 25])
def test_ids_outside_the_vocabulary_are_refused(module, token):
    with pytest.raises(IndexError, match=r"\[0, 25\)"):
        module(torch.tensor([1, token]))
