"""Context batches against a plain loop, and the promises of their docstring as properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.data.tokens import ContextBatches
from deepenough.errors import UserError

BATCH, LENGTH = st.integers(1, 6), st.integers(1, 7)


def context_batches_ref(ids, batch_size, length):
    """Lane by lane, token by token: [(input rows, label rows), ...]."""
    num_batches = (len(ids) - 1) // (batch_size * length)
    batches = []
    for t in range(num_batches):
        inputs, labels = [], []
        for lane in range(batch_size):
            first = lane * num_batches * length + t * length
            inputs.append([int(ids[first + i]) for i in range(length)])
            labels.append([int(ids[first + i + 1]) for i in range(length)])
        batches.append((inputs, labels))
    return batches


@st.composite
def streams(draw):
    batch_size, length = draw(BATCH), draw(LENGTH)
    needed = batch_size * length + 1
    num_tokens = draw(st.integers(needed, needed * 6))
    # Every token is its own position, so that a token tells where it came from.
    return np.arange(num_tokens, dtype=np.uint16), batch_size, length


@given(streams())
def test_equals_plain_loop(stream):
    ids, batch_size, length = stream
    batches = ContextBatches(ids, batch_size, length)
    expected = context_batches_ref(ids, batch_size, length)
    assert len(batches) == len(expected) > 0
    for batch, (inputs, labels) in zip(batches, expected, strict=True):
        assert batch["input_ids"].tolist() == inputs
        assert batch["labels"].tolist() == labels
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@given(streams())
def test_each_lane_follows_on_and_little_is_dropped(stream):
    ids, batch_size, length = stream
    batches = ContextBatches(ids, batch_size, length)
    lanes = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    labels = torch.cat([batch["labels"] for batch in batches], dim=1)
    # Nothing is skipped or repeated within a lane, and no token is the input of two lanes.
    assert torch.equal(lanes.diff(dim=1), torch.ones_like(lanes[:, 1:]))
    assert lanes.unique().numel() == lanes.numel()
    assert torch.equal(labels, lanes + 1)
    seen = set(lanes.flatten().tolist()) | set(labels.flatten().tolist())
    assert len(ids) - len(seen) == batches.num_dropped < batch_size * length


@given(streams(), st.integers(1, 4))
def test_ranks_share_the_lanes(stream, world_size):
    ids, share, length = stream
    batch_size = share * world_size
    if len(ids) <= batch_size * length:
        ids = np.arange(batch_size * length + 1, dtype=np.uint16)
    whole = ContextBatches(ids, batch_size, length)
    parts = [
        ContextBatches(ids, batch_size, length, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for t in range(len(whole)):
        for key, value in whole[t].items():
            assert torch.equal(torch.cat([part[t][key] for part in parts]), value)


@given(streams(), st.data())
def test_continues_from_a_cursor(stream, data):
    batches = ContextBatches(*stream)
    cursor = data.draw(st.integers(0, len(batches)))
    rest = [batch["input_ids"].tolist() for batch in batches.iter_from(cursor)]
    assert rest == [batch["input_ids"].tolist() for batch in batches][cursor:]


def test_indexing_ends():
    batches = ContextBatches(np.arange(9, dtype=np.uint16), 2, 2)
    assert len(batches) == 2
    assert batches[-1]["input_ids"].tolist() == batches[1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        batches[2]


def test_reads_only_what_a_batch_needs(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    batches = ContextBatches(np.memmap(path, dtype=np.uint16, mode="r"), 4, 5)
    assert np.shares_memory(batches._inputs, batches._labels)
    assert batches[0]["input_ids"].shape == (4, 5)


def test_too_short_says_how_many():
    with pytest.raises(UserError, match="has 6 tokens, but one batch of 2 x 3 needs 7"):
        ContextBatches(np.arange(6, dtype=np.uint16), 2, 3)
    assert len(ContextBatches(np.arange(7, dtype=np.uint16), 2, 3)) == 1


@pytest.mark.parametrize("ids", [[], [5]])
def test_almost_no_tokens(ids):
    with pytest.raises(UserError, match=f"has {len(ids)} tokens"):
        ContextBatches(np.array(ids, dtype=np.uint16), 1, 1)


@pytest.mark.parametrize(
    ("batch_size", "length", "world_size", "message"),
    [(4, 2, 3, "multiple of 3"), (0, 2, 1, "at least 1"), (2, 0, 1, "at least 1")],
)
def test_impossible_shapes(batch_size, length, world_size, message):
    with pytest.raises(UserError, match=message):
        ContextBatches(np.arange(99), batch_size, length, world_size=world_size)
