"""Labels against their definition, difficulties within bounds, batches a function of their seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepenough.errors import UserError
from deepenough.ponder.parity_data import ParityData, parity_batch, parity_ref


def test_a_case_worked_by_hand() -> None:
    assert parity_ref([1, 0, -1, 1, 0, 1]) == 1
    assert parity_ref([1, 0, -1, 1, 0, -1]) == 0
    assert parity_ref([0, -1]) == 0


@given(st.integers(1, 12), st.data())
def test_batches_are_what_they_say(size: int, data: st.DataObject) -> None:
    lowest = data.draw(st.integers(1, size))
    highest = data.draw(st.integers(lowest, size))
    batch = parity_batch(20, size, lowest, highest, seed=data.draw(st.integers(0, 1 << 40)))
    assert batch.vectors.shape == (20, size)
    assert set(batch.vectors.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.equal((batch.vectors != 0).sum(1), batch.nonzero)
    assert lowest <= int(batch.nonzero.min()) and int(batch.nonzero.max()) <= highest
    assert batch.labels.tolist() == [parity_ref(row) for row in batch.vectors.tolist()]


def test_a_seed_decides_everything() -> None:
    first, again, other = (parity_batch(50, 8, 1, 8, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.vectors, other.vectors)


def test_all_difficulties_places_and_labels_come_up_evenly() -> None:
    batch = parity_batch(20_000, 8, 1, 8, seed=0)
    assert (batch.nonzero.bincount(minlength=9)[1:] / 20_000).sub(1 / 8).abs().max() < 0.01
    assert (batch.vectors.abs().mean(0) - 4.5 / 8).abs().max() < 0.02
    assert abs(float(batch.labels.float().mean()) - 0.5) < 0.02


def test_bands_cover_all_difficulties() -> None:
    assert ParityData(size=8, train_nonzero=4, bands=4).ranges() == [(1, 2), (3, 4), (5, 6), (7, 8)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 0}, "data.size"),
        ({"size": 4, "train_nonzero": 5}, "only 4 entries"),
        ({"size": 10, "train_nonzero": 5, "bands": 4}, "must divide"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ParityData(**changes).check()


def test_impossible_difficulties_are_refused() -> None:
    with pytest.raises(ValueError, match="4 entries"):
        parity_batch(1, 4, 3, 5, seed=0)
