"""Batches of like lengths: everything once, reproducible from anywhere, little padding."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepenough.data.classification_batches import LengthBatches, by_length

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
