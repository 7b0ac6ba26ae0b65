"""Context batches against a plain loop, and the promises of their docstring as properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.data.batches import LengthBatches, TokenBatches, by_length, cut_by_tokens
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
    assert len(ids) - len(seen) < batch_size * length


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


def test_indexing_ends():
    batches = ContextBatches(np.arange(9, dtype=np.uint16), 2, 2)
    assert len(batches) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            batches[index]


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


def test_streams_are_shared_evenly_or_not_at_all():
    with pytest.raises(UserError, match="multiple of 3"):
        ContextBatches(np.arange(99), 4, 2, world_size=3)


# -- batches of similar length -------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 1 << 62))
def test_every_epoch_has_every_example_at_most_once(
    lengths: list[int], size: int, seed: int
) -> None:
    batches = LengthBatches(lengths, size, seed)
    for epoch in range(2):
        start = epoch * len(batches)
        rows = [row for i in range(len(batches)) for row in batches.rows(start + i)]
        assert len(set(rows)) == len(rows)
        assert len(lengths) - len(rows) < size  # only what does not fill a batch is left out


def test_a_batch_does_not_depend_on_those_asked_for_before() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500).tolist()
    asked = LengthBatches(lengths, 8, seed=3)
    in_order = [asked.rows(i) for i in range(3 * len(asked))]
    for index in (150, 0, 80, 62):
        assert LengthBatches(lengths, 8, seed=3).rows(index) == in_order[index]
    assert in_order[: len(asked)] != in_order[len(asked) : 2 * len(asked)]
    assert LengthBatches(lengths, 8, seed=4).rows(0) != in_order[0]


def test_there_is_little_padding_and_lengths_come_in_no_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 3000)
    batches = LengthBatches(lengths.tolist(), 16, seed=0)
    longest = [lengths[batches.rows(i)].max() for i in range(len(batches))]
    assert lengths.sum() / (16 * sum(longest)) > 0.9
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.3


def test_fewer_examples_than_a_batch_are_one() -> None:
    batches = LengthBatches([5, 6, 7], 32, seed=0)
    assert len(batches) == 1
    assert sorted(batches.rows(4)) == [0, 1, 2]


@given(LENGTHS, st.integers(1, 9))
def test_by_length_takes_all_longest_first(lengths: list[int], size: int) -> None:
    rows = [row for batch in by_length(lengths, size) for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    assert [lengths[row] for row in rows] == sorted(lengths, reverse=True)


def lengths(seed: int, num: int = 500) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(2, 30, num), generator.integers(2, 30, num)


def test_batches_hold_so_many_tokens_and_every_pair_once_an_epoch():
    source, target = lengths(0)
    batches = TokenBatches(source, target, 200, seed=1)
    epoch = [batches.rows(index) for index in range(len(batches))]
    assert sorted(row for rows in epoch for row in rows) == list(range(500))
    for rows in epoch:
        assert len(rows) * max(source[rows].max(), target[rows].max()) <= 200
    real = sum(target[rows].sum() for rows in epoch)
    padded = sum(len(rows) * target[rows].max() for rows in epoch)
    assert real / padded > 0.8


def test_any_batch_can_be_asked_for_first():
    source, target = lengths(2)
    whole = TokenBatches(source, target, 150, seed=1)
    wanted = 3 * len(whole)
    expected = [whole.rows(index) for index in range(wanted + 1)]
    fresh = TokenBatches(source, target, 150, seed=1)
    assert fresh.rows(wanted) == expected[wanted]
    assert fresh.rows(5) == expected[5]
    assert TokenBatches(source, target, 150, seed=2).rows(5) != expected[5]
    assert expected[0] != expected[len(whole)]  # epochs differ


def test_cutting_by_hand():
    order, sizes = np.array([3, 1, 0, 2]), np.array([4, 2, 5, 2])
    assert [rows.tolist() for rows in cut_by_tokens(order, sizes, 8)] == [[3, 1], [0], [2]]
