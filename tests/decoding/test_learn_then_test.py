"""Learn then Test: p-values by hand and by scipy, and a guarantee that holds."""

import math

import pytest
import torch
from scipy.stats import binom

from deepenough.decoding.calibration import (
    hoeffding_bentkus_p_value,
    learn_then_test,
    texts_needed,
)


def choose(losses_NT, thresholds, *limits):
    """Losses are given as a column for each threshold."""
    columns = dict(zip(thresholds, losses_NT.unbind(1), strict=True))
    return learn_then_test(columns.__getitem__, thresholds, *limits)[0]


def test_p_values_by_hand() -> None:
    # No loss in 10 texts: both bounds are powers of 1 - alpha, and Hoeffding's is the smaller.
    assert hoeffding_bentkus_p_value(0.0, 10, 0.2) == pytest.approx(0.8**10)
    # One loss in two: P(Bin(2, 0.1) <= 1) = 1 - 0.01, times e is above 1, and 0.5 > alpha.
    assert hoeffding_bentkus_p_value(0.5, 2, 0.1) == 1.0
    # Every text lost: no evidence at all.
    assert hoeffding_bentkus_p_value(1.0, 10, 0.2) == 1.0


@pytest.mark.parametrize("texts", [1, 60, 300, 2000])
@pytest.mark.parametrize("mean", [0.0, 0.013, 0.04, 0.05, 0.2])
def test_p_value_is_the_smaller_of_two_bounds(texts, mean) -> None:
    bentkus = math.e * binom.cdf(math.ceil(round(texts * mean, 9)), texts, 0.05)
    a = min(mean, 0.05)
    kl = (a * math.log(a / 0.05) if a else 0.0) + (1 - a) * math.log((1 - a) / 0.95)
    assert hoeffding_bentkus_p_value(mean, texts, 0.05) == pytest.approx(
        min(1, bentkus, math.exp(-texts * kl))
    )


def test_none_may_hold() -> None:
    assert choose(torch.full((100, 2), 0.5), [0.9, 0.8]) is None


def test_enough_texts_are_enough() -> None:
    needed = texts_needed(0.05, 0.95)
    assert needed == 59
    assert choose(torch.zeros(needed, 1), [0.5]) == 0.5
    assert choose(torch.zeros(needed - 1, 1), [0.5]) is None


def test_the_guarantee_holds_on_random_losses() -> None:
    """Texts differ in how often they disagree; thresholds in how much, around what is allowed."""
    generator = torch.Generator().manual_seed(0)
    thresholds = [1 - step / 20 for step in range(20)]
    means = torch.linspace(0.005, 0.1, 20)
    exceeded = 0
    for _ in range(200):
        difficulty = torch.rand(150, 1, generator=generator) * 2
        losses = (torch.rand(150, 20, generator=generator) < difficulty * means).double()
        found = choose(losses, thresholds)
        if found is not None:
            exceeded += float(means[thresholds.index(found)]) > 0.05
    assert exceeded / 200 <= 0.05


def test_testing_stops_at_the_first_that_fails() -> None:
    """The last would pass by itself, but comes after one that did not, and is not measured."""
    measured = []

    def losses(threshold: float) -> torch.Tensor:
        measured.append(threshold)
        return torch.full((200,), 0.3 if threshold == 0.5 else 0.01)

    found, risks, p_values = learn_then_test(losses, [0.9, 0.7, 0.5, 0.3])
    assert (found, measured) == (0.7, [0.9, 0.7, 0.5])
    assert risks == pytest.approx([0.01, 0.01, 0.3])
    assert len(p_values) == 3


def test_few_splits_fail(failures) -> None:
    assert failures(torch.full((300, 2), 0.01), [0.9, 0.8]) == 0.0
    generator = torch.Generator().manual_seed(1)
    losses = (torch.rand(400, 3, generator=generator) < torch.tensor([0.0, 0.02, 0.2])).double()
    assert failures(losses, [0.9, 0.5, 0.1], splits=50) <= 0.1
