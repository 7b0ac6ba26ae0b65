"""Deriving a pattern: the likeliest, and the likeliest within a budget against all 3^N of them."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepenough import UserError
from deepenough.par.derive import BlockCosts, derive, derive_ref
from deepenough.par.pattern import BRANCHES, interleaved

COSTS = BlockCosts(attention=4.0, dense=2.0, identity=0.0, rest=1.0)


@st.composite
def searches(draw: st.DrawFn) -> list[list[float]]:
    """Probabilities of one to five blocks; rounded, so that ties are common."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        raw = [draw(st.integers(0, 8)) for _ in BRANCHES]
        total = sum(raw) or 1
        rows.append([value / total for value in raw])
    return rows


cost_values = st.one_of(st.just(0.0), st.floats(0.01, 10.0))
cost_tables = st.builds(
    BlockCosts, cost_values, cost_values, st.floats(0.0, 1.0), rest=st.floats(0.01, 20.0)
)


def log_likelihood(rows: list[list[float]], pattern: str) -> float:
    chosen = [row[BRANCHES.index(kind)] for row, kind in zip(rows, pattern, strict=True)]
    return sum(math.log(max(p, 1e-300)) for p in chosen)


def test_without_a_budget_every_block_takes_its_likeliest_branch():
    rows = [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]]
    assert derive(rows) == "ad-a"
    assert derive(rows, COSTS) == "ad-a"


@given(searches())
def test_without_a_budget_it_is_the_argmax(rows):
    assume(any(max(row[:2]) >= row[2] for row in rows))  # else only identities
    best = "".join(BRANCHES[row.index(max(row))] for row in rows)
    assert log_likelihood(rows, derive(rows)) == pytest.approx(log_likelihood(rows, best))


def test_identities_alone_are_no_pattern():
    rows = [[0.1, 0.2, 0.7], [0.2, 0.1, 0.7]]
    # The smallest loss against `--` is one block of the second choice.
    assert derive(rows) in ("d-", "-a")
    assert derive([[0.3, 0.0, 0.7]]) == "a"


def test_budget_takes_the_least_likely_attention_away():
    rows = [[0.9, 0.05, 0.05], [0.6, 0.4, 0.0], [0.8, 0.2, 0.0], [0.1, 0.8, 0.1]]
    assert derive(rows) == "aaad"
    # Of 13 for `adad`: aaad costs 15, aadd 13, addd 11.
    assert derive(rows, COSTS, 1.1) == "adad"
    assert derive(rows, COSTS, 1.0) == "adad"
    assert derive(rows, COSTS, 0.9) == "addd"


def test_spending_the_budget_brings_back_the_likeliest_attention():
    rows = [[0.1, 0.9, 0.0], [0.4, 0.6, 0.0], [0.3, 0.7, 0.0], [0.2, 0.8, 0.0]]
    assert derive(rows, COSTS, 1.0) == "dddd"
    # Of 13 for `adad`: one attention block costs 11, two cost 13.
    assert derive(rows, COSTS, 1.0, spend=0.8) == "dadd"
    assert derive(rows, COSTS, 1.0, spend=0.9) == "daad"
    with pytest.raises(UserError, match=r"the dearest within the budget, [ad-]+, costs 0.846"):
        derive(rows, COSTS, 0.9, spend=0.99)


@given(searches(), cost_tables, st.floats(0.05, 1.6), st.sampled_from([0.0, 0.5, 0.9]))
def test_budget_is_kept_and_no_pattern_within_it_is_likelier(rows, costs, budget, spend):
    expected = derive_ref(rows, costs, budget, spend)
    if expected is None:
        with pytest.raises(UserError, match="No pattern"):
            derive(rows, costs, budget, spend)
        return
    pattern = derive(rows, costs, budget, spend)
    assert spend * budget <= costs.relative(pattern) <= budget
    assert len(pattern) == len(rows)
    assert set(pattern) != {"-"}
    assert log_likelihood(rows, pattern) == pytest.approx(expected[1])


@given(cost_tables, st.integers(2, 8))
def test_budget_of_one_admits_every_order_of_the_baselines_blocks(costs, num_blocks):
    """Sums in another order may differ in the last bit, which must not cost a pattern its place."""
    pattern = "".join(sorted(interleaved(num_blocks)))
    rows = [[float(kind == letter) for kind in BRANCHES] for letter in pattern]
    assert costs.relative(pattern) == 1.0
    assert derive(rows, costs, 1.0) == pattern


def test_impossible_budget_names_the_cheapest_pattern_and_a_budget_that_works():
    rows = [[0.9, 0.05, 0.05]] * 3
    with pytest.raises(UserError) as caught:
        derive(rows, COSTS, 0.2)
    message = str(caught.value)
    assert message.startswith("No pattern of 3 blocks costs at most 0.2 of the interleaved")
    # (1 + 2) / (1 + 4 + 2 + 4), rounded up.
    assert message.endswith("needs a budget of 0.273.")
    assert derive(rows, COSTS, 0.273).count("d") == 1


def test_budget_without_costs_is_refused():
    with pytest.raises(ValueError, match="needs the costs"):
        derive([[0.3, 0.3, 0.4]], budget=0.5)


def test_costs_by_hand():
    costs = BlockCosts(attention=3.0, dense=2.0, identity=0.5, rest=10.0)
    assert costs.of("aad-") == 18.5
    assert costs.relative("aad-") == 18.5 / 20.0
    assert [costs.of_block(kind) for kind in BRANCHES] == [3.0, 2.0, 0.5]


def test_what_was_given_stays_whatever_the_budget():
    rows = [[0.1, 0.1, 0.8]] * 4
    assert derive(rows, fixed="aa**") == "aa--"
    # (1 + 2 * 4) / (1 + 2 * (4 + 2)) = 0.69
    assert derive(rows, COSTS, 0.7, fixed="aa**") == "aa--"
    with pytest.raises(UserError, match=r"the cheapest, aa--, needs a budget of 0\.693"):
        derive(rows, COSTS, 0.6, fixed="aa**")


def test_how_unlikely_a_choice_is_matters():
    rows = [[1 - 4e-7, 4e-7, 1e-12], [1.0, 1e-12, 1e-12]]
    costs = BlockCosts(attention=2.0, dense=1.0, identity=0.0, rest=1.0)
    assert derive(rows, costs, 1.0) == "da"
