"""The fitted costs: fits that are known, a real measurement, and what is chosen from it."""

import numpy as np
import pytest
import torch

from deepenough.errors import UserError
from deepenough.nn import cutoff_choice, softmax_cost, softmax_time
from deepenough.nn.cutoff_choice import choose_cutoffs
from deepenough.nn.cutoffs import ClusterCost, optimal_cutoffs
from deepenough.nn.softmax_cost import (
    LayerShape,
    SoftmaxCost,
    fit_non_negative,
    measure_softmax_cost,
)
from deepenough.nn.softmax_time import can_be_timed, time_partitions

SHAPE = LayerShape(d_model=16, div_value=2.0, batch_tokens=64)
COUNTS = (3000 / np.arange(1, 301)).astype(np.int64)


def test_fit_recovers_known_coefficients():
    rows, words = np.meshgrid([1.0, 10, 100], [30.0, 300, 3000])
    features = np.stack([np.ones(9), rows.ravel(), words.ravel(), (rows * words).ravel()], axis=1)
    for known in ([1e-4, 2e-6, 3e-8, 4e-9], [1e-4, 0, 0, 4e-9]):
        assert fit_non_negative(features, features @ known) == pytest.approx(known, rel=1e-6)


def test_fit_is_the_constrained_optimum():
    """Where plain least squares would go below zero: no small move inside the bounds is better."""
    rng = np.random.default_rng(1)
    features = rng.random((12, 4)) + 0.1
    seconds = features @ [0.5, -0.3, 1.0, 0.2] + 0.2
    found = fit_non_negative(features, seconds)
    assert (found >= 0).all()
    assert (found == 0).any()

    def error(coefficients):
        return np.sum((features @ coefficients / seconds - 1) ** 2)

    for index in range(4):
        for step in (-1e-3, 1e-3):
            moved = found.copy()
            moved[index] = max(moved[index] + step, 0)
            assert error(moved) >= error(found)


def test_widths_are_those_of_torch():
    for d_model, div_value in ((16, 2.0), (100, 3.0), (128, 4.0)):
        widths = LayerShape(d_model, div_value).tail_widths(3)
        layer = torch.nn.AdaptiveLogSoftmaxWithLoss(d_model, 9, [1, 2, 3], div_value=div_value)
        assert widths == [tail[0].out_features for tail in layer.tail]
    assert LayerShape(16, 4.0).tail_widths(5) == [4, 1]  # beyond, torch's own would be empty


def test_measurement_gives_costs_that_grow():
    seen = []
    cost = measure_softmax_cost(
        300, SHAPE, max_clusters=3, rounds=2, track=lambda points: seen.extend(points) or points
    )
    assert len(cost.tails) == 2
    assert len(seen) == 2 * cost.num_points
    assert all(value >= 0 for part in (cost.head, *cost.tails) for value in vars(part).values())
    assert cost.head(300, 1.0) > 0
    assert all(tail(300, 0.5) >= tail(30, 0.1) > 0 for tail in cost.tails)
    assert cost.seconds(COUNTS, [10, 100]) == pytest.approx(
        cost.head(12, 1.0)
        + cost.tails[0](90, COUNTS[10:100].sum() / COUNTS.sum())
        + cost.tails[1](200, COUNTS[100:].sum() / COUNTS.sum())
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 40])
def test_tiny_vocabularies_can_be_measured(vocab_size):
    cost = measure_softmax_cost(vocab_size, SHAPE, max_clusters=2, rounds=1)
    assert cost.num_points > 1


def test_measuring_leaves_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_softmax_cost(40, SHAPE, max_clusters=2, rounds=1)
    time_partitions(COUNTS, [[5]], SHAPE, rounds=1)
    assert torch.equal(torch.rand(3), expected)


def test_typical_batch_has_every_cluster_at_its_share():
    shares = COUNTS / COUNTS.sum()
    batch = softmax_time._typical_batch(shares, 1000).numpy()
    for cut in (1, 7, 50, 299):
        assert np.mean(batch < cut) == pytest.approx(shares[:cut].sum(), abs=1e-3)


def test_layers_are_timed(monkeypatch):
    layers = [[], [30], [10, 100]]
    turns = []
    times = time_partitions(COUNTS, layers, SHAPE, 2, lambda items: turns.extend(items) or items)
    assert len(turns) == 2
    assert all(0 < seconds < 60 for seconds in times)
    monkeypatch.setattr(softmax_time, "_PATIENCE", 0.0)
    monkeypatch.setattr(softmax_cost, "_PATIENCE", 0.0)
    assert len(time_partitions(COUNTS, layers, SHAPE, 10**6)) == 3  # ends long before
    assert measure_softmax_cost(40, SHAPE, 2, rounds=1000).num_points > 1


def test_where_a_layer_is_too_large_to_run_the_fit_decides(monkeypatch):
    assert can_be_timed(COUNTS, [], SHAPE)
    monkeypatch.setattr(softmax_time, "_MAX_OUTPUTS", 64 * 100)
    assert not can_be_timed(COUNTS, [], SHAPE)
    assert not can_be_timed(COUNTS, [1], SHAPE)
    assert can_be_timed(COUNTS, [30], SHAPE)
    monkeypatch.setattr(softmax_time, "_MAX_OUTPUTS", 1)
    choice = choose_cutoffs(COUNTS, SHAPE, max_clusters=3)
    assert all(candidate.measured is None for candidate in choice.candidates)
    assert choice.best.fitted == min(candidate.fitted for candidate in choice.candidates)


def test_choice_among_numbers_of_clusters():
    titles = set()
    choice = choose_cutoffs(
        COUNTS, SHAPE, max_clusters=3, track=lambda items, title: titles.add(title) or items
    )
    assert len(titles) == 2
    found = {tuple(candidate.cutoffs) for candidate in choice.candidates}
    assert () in found
    assert {tuple(optimal_cutoffs(COUNTS, k).cutoffs) for k in (2, 3)} <= found
    run = [c.measured for c in choice.candidates if c.measured is not None]
    assert choice.best.measured == min(run)


def test_the_clock_decides_where_the_fit_is_wrong(monkeypatch):
    """With a fit that likes few clusters and a clock that likes many, many are chosen."""

    def fit(_vocab_size, _shape, max_clusters, **_):
        tails = [ClusterCost(0.1, 0, 0, 0)] * (max_clusters - 1)
        return SoftmaxCost(ClusterCost(1, 0, 0, 0), tails, relative_error=0, num_points=1)

    monkeypatch.setattr(cutoff_choice, "measure_softmax_cost", fit)
    monkeypatch.setattr(
        cutoff_choice,
        "time_partitions",
        lambda _, cuts, *__, **___: [1 / (1 + len(c)) for c in cuts],
    )
    assert len(choose_cutoffs(COUNTS, SHAPE, max_clusters=3).best.cutoffs) == 2
    assert len(choose_cutoffs(COUNTS, SHAPE, clusters=2).best.cutoffs) == 1


@pytest.mark.parametrize(
    ("shape", "clusters", "sentence"),
    [
        (SHAPE, 301, "from 1 to 300"),
        (SHAPE, 0, "from 1 to 300"),
        (LayerShape(16, 4.0), 4, "3 clusters at most"),
    ],
)
def test_impossible_numbers_of_clusters(shape, clusters, sentence):
    with pytest.raises(UserError, match=sentence):
        choose_cutoffs(COUNTS, shape, clusters=clusters)


def test_impossible_layers():
    for wrong in ((0, 4.0, 8), (8, 0.5, 8), (8, float("nan"), 8), (8, 4.0, 0)):
        with pytest.raises(UserError, match="at least 1"):
            LayerShape(*wrong)
