"""The fast solver against the plain loop, and both against every partition there is."""

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough.errors import UserError
from deepenough.nn import cutoffs as solver
from deepenough.nn.cutoffs import (
    ClusterCost,
    cheapest_cutoffs,
    optimal_cutoffs,
    optimal_cutoffs_ref,
    partition_cost,
)

# Few different values make ties, zeros and runs of equal counts the rule.
few_values = st.lists(st.integers(0, 3), min_size=1, max_size=40)
many_values = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)
fractions = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30)


def exact_cost(masses, bounds):
    pieces = itertools.pairwise((0, *bounds, len(masses)))
    return sum((j - i) * sum(map(Fraction, masses[i:j])) for i, j in pieces)


def brute_force(masses, clusters):
    """All cutoffs of least cost, smallest last cutoff first."""
    cuts = list(itertools.combinations(range(1, len(masses)), clusters - 1))
    costs = [exact_cost(masses, cut) for cut in cuts]
    best = [list(cut) for cut, cost in zip(cuts, costs, strict=True) if cost == min(costs)]
    return min(best, key=lambda cut: cut[::-1]), min(costs)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_partition_of_a_small_vocabulary(data):
    masses = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    clusters = data.draw(st.integers(1, len(masses)))
    cutoffs, cost = brute_force(masses, clusters)
    found = optimal_cutoffs(masses, clusters)
    assert found.cutoffs == cutoffs
    assert found.cost == pytest.approx(float(cost / max(sum(masses), 1)), rel=1e-15)
    assert found == optimal_cutoffs_ref(masses, clusters)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_equals_the_plain_loop_in_any_order(data):
    masses = data.draw(few_values | many_values)
    if data.draw(st.booleans()):  # descending masses are solved in a smaller space
        masses.sort(reverse=True)
    clusters = data.draw(st.integers(1, len(masses)))
    assert optimal_cutoffs(masses, clusters) == optimal_cutoffs_ref(masses, clusters)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_fractions_reach_the_same_cost(data):
    masses = data.draw(fractions)
    clusters = data.draw(st.integers(1, len(masses)))
    fast, plain = optimal_cutoffs(masses, clusters), optimal_cutoffs_ref(masses, clusters)
    assert fast.cost == pytest.approx(plain.cost, rel=1e-12, abs=1e-300)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.integers(2, 3))
def test_sorted_intervals_are_best_of_all_partitions(masses, clusters):
    """Not only of intervals: any assignment of words to clusters costs at least as much."""
    clusters = min(clusters, len(masses))
    best = math.inf
    for labels in itertools.product(range(clusters), repeat=len(masses)):
        if len(set(labels)) == clusters:
            groups = [
                [m for m, c in zip(masses, labels, strict=True) if c == k] for k in set(labels)
            ]
            best = min(best, sum(len(group) * sum(group) for group in groups))
    found = optimal_cutoffs(sorted(masses, reverse=True), clusters)
    assert exact_cost(sorted(masses, reverse=True), found.cutoffs) == best


def test_rows_split_over_many_small_batches(monkeypatch):
    """The flat arrays are cut into pieces; where they are cut must not matter."""
    masses = np.random.default_rng(0).integers(0, 50, 700)
    expected = optimal_cutoffs_ref(masses, 6)
    for pairs in (1, 2, 7, 64, 10**9):
        monkeypatch.setattr(solver, "_PAIRS_AT_ONCE", pairs)
        assert optimal_cutoffs(masses, 6) == expected


def test_extreme_numbers_of_clusters():
    masses = [9, 5, 5, 2, 0, 0]
    assert optimal_cutoffs(masses, 1).cutoffs == []
    assert optimal_cutoffs(masses, 1).cost == 6
    assert optimal_cutoffs(masses, 6).cutoffs == [1, 2, 3, 4, 5]
    assert optimal_cutoffs(masses, 6).cost == 1
    assert optimal_cutoffs([7], 1).cutoffs == []


def test_equal_and_absent_words():
    assert optimal_cutoffs(np.ones(999, dtype=np.int64), 3).cutoffs == [333, 666]
    assert optimal_cutoffs([0, 0, 0, 0], 3) == optimal_cutoffs_ref([0, 0, 0, 0], 3)
    assert optimal_cutoffs([0, 0, 0, 0], 3).cost == 0


def test_whole_numbers_stay_exact_where_floats_do_not():
    """Two cuts that differ by one part in 10^17: float64 cannot tell them apart, int64 does."""
    big = 10**17
    assert float(big + 1) == float(big)
    assert optimal_cutoffs([big, 0, big + 1], 2).cutoffs == [2]  # [1] costs one more
    assert optimal_cutoffs([big + 1, 0, big], 2).cutoffs == [1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.uint64, np.float32, bool])
def test_counts_of_any_type(dtype):
    masses = np.array([1, 1, 1, 1, 0, 0, 0, 1]).astype(dtype)
    assert optimal_cutoffs(masses, 3).cutoffs == optimal_cutoffs_ref(masses.astype(int), 3).cutoffs


@pytest.mark.parametrize("total_bits", [60, 62, 63, 70])
def test_counts_near_and_beyond_64_bits(total_bits):
    """No sum wraps around; beyond 63 bits the cost is the optimum to float64 precision."""
    rng = np.random.default_rng(total_bits)
    shares = np.sort(rng.pareto(1.1, 200))[::-1]
    ints = [int(x) for x in shares / shares.sum() * 2.0 ** (total_bits - 8)]
    masses = np.array(ints, dtype=np.uint64)
    found = optimal_cutoffs(masses, 4)
    plain = optimal_cutoffs_ref(masses, 4)  # Python integers have no limit
    assert found.cost == pytest.approx(plain.cost, rel=1e-13)
    if total_bits <= 62:
        assert found == plain


def test_cost_of_given_cutoffs():
    assert partition_cost([6, 2, 1, 1], [1, 2]) == pytest.approx((6 + 2 + 2 * 2) / 10)
    assert partition_cost([0.6, 0.2, 0.1, 0.1], [1, 2]) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("masses", "clusters", "words"),
    [
        ([], 1, "non-empty"),
        ([[1, 2]], 1, "list of numbers"),
        (["a"], 1, "list of numbers"),
        ([1, -1], 1, "negative"),
        ([1.0, math.nan], 1, "finite"),
        ([1.0, math.inf], 1, "finite"),
        ([1, 2], 0, "from 1 to 2"),
        ([1, 2], 3, "from 1 to 2"),
    ],
)
def test_bad_input_is_refused(masses, clusters, words):
    for solve in (optimal_cutoffs, optimal_cutoffs_ref):
        with pytest.raises(UserError, match=words):
            solve(masses, clusters)


coefficient = st.floats(0, 10, allow_subnormal=False)
cluster_cost = st.builds(ClusterCost, coefficient, coefficient, coefficient, coefficient)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    cluster_cost,
    st.lists(cluster_cost, max_size=4),
)
def test_given_costs_against_every_partition(masses, head, tails):
    total = sum(masses)
    found = cheapest_cutoffs(masses, head, tails)
    assert len(found) == min(len(tails) + 1, len(masses))

    def cost(cut):
        bounds = (*cut, len(masses))
        seconds = head(bounds[0] + len(cut), 1.0)
        for tail, (i, j) in zip(tails, itertools.pairwise(bounds), strict=False):
            seconds += tail(j - i, sum(masses[i:j]) / total)
        return seconds

    for clusters, partition in enumerate(found, start=1):
        assert partition.num_clusters == clusters
        best = min(map(cost, itertools.combinations(range(1, len(masses)), clusters - 1)))
        assert partition.cost == pytest.approx(best, rel=1e-12)
        assert cost(partition.cutoffs) == pytest.approx(best, rel=1e-12)


def test_negative_costs_are_refused():
    with pytest.raises(UserError, match="negative"):
        cheapest_cutoffs([1, 2], ClusterCost(0, 1, 0, 0), [ClusterCost(0, 0, 0, -1)])


def test_torch_accepts_the_cutoffs():
    torch = pytest.importorskip("torch")
    found = optimal_cutoffs([50, 20, 10, 5, 5, 5, 3, 2], 3)
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 8, found.cutoffs, div_value=2.0)
    assert layer.n_clusters == 2


def test_a_million_words_take_seconds():
    """The budget is ten seconds; a quadratic solver would take days."""
    counts = (1e9 / np.arange(1, 1_000_001)).astype(np.int64)
    start = time.perf_counter()
    found = optimal_cutoffs(counts, 3)
    assert time.perf_counter() - start < 10
    # Moving a single cutoff by one never helps.
    for k, step in itertools.product(range(2), (-1, 1)):
        moved = list(found.cutoffs)
        moved[k] += step
        assert partition_cost(counts, moved) >= found.cost
