"""Which exits pay: prices by hand, and against every set there is."""

from itertools import combinations

import pytest
import torch

from deepenough.decoding.accelerate import accelerate
from deepenough.decoding.leaving import EarlyExit
from deepenough.decoding.making import make_engine
from deepenough.decoding.planning import (
    Prices,
    candidates,
    choose_exits,
    expected_price,
    grow_exits,
    measured_prices,
    weight_prices,
    write_some,
)
from deepenough.decoding.policies import FixedLayer, TopProbability


def test_a_price_by_hand() -> None:
    """Four layers at 10, a test 3, the head 5, a filled layer 1; exits after layers 1 and 2."""
    leaves = torch.tensor([[True, False, False, True], [True, True, False, True]])
    right = torch.tensor([[True, False, False, False], [True, True, False, True]])
    prices = Prices(layer=10, test=3, head=5, fill=1)
    # Left at 1: 10 + 3 filled + one test; left at 2: 20 + 2 + two tests; never: 40 + two tests + 5;
    # left at 1 and wrong: as far as the last layer, after one test.
    each = [10 + 3 + 3, 20 + 2 + 6, 40 + 6 + 5, 40 + 3 + 5]
    found = expected_price(leaves, right, [1, 2], [1, 2], 4, prices, listed=False)
    assert found == pytest.approx(sum(each) / 4)
    # With a shortlist, what leaves pays for the head as well.
    found = expected_price(leaves, right, [1, 2], [1, 2], 4, prices, listed=True)
    assert found == pytest.approx((sum(each) + 10) / 4)
    # Asked at the second alone, the last token is right.
    each = [20 + 2 + 3, 20 + 2 + 3, 40 + 3 + 5, 20 + 2 + 3]
    found = expected_price(leaves, right, [1, 2], [2], 4, prices, listed=False)
    assert found == pytest.approx(sum(each) / 4)


@pytest.mark.parametrize("seed", range(5))
def test_grown_exits_are_close_to_the_best(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = list(range(1, 8))
    ease = torch.rand(200, generator=generator)
    leaves = torch.stack([ease < layer / 9 for layer in layers])
    right = leaves & (torch.rand(7, 200, generator=generator) < 0.95)
    prices = Prices(layer=1, test=0.3, head=1, fill=0.1)

    def price(exits):
        return expected_price(leaves, right, layers, exits, 8, prices, listed=True)

    every = [list(s) for n in range(1, 8) for s in combinations(layers, n)]
    best = min(price(exits) for exits in every)
    assert price(grow_exits(price, layers)) <= 1.03 * best


def test_candidates() -> None:
    assert candidates(3) == [1, 2]
    assert candidates(30)[-1] == 29
    assert len(candidates(30)) <= 16
    assert len(candidates(100)) <= 16


def test_dear_tests_leave_one_exit(small, shortcuts) -> None:
    engine = make_engine(small)
    early = EarlyExit(shortcuts, TopProbability(0.2), [1], "copy")
    ids = write_some(engine)
    assert ids.shape == (8, 24)
    assert torch.equal(ids, write_some(engine))
    dear = Prices(layer=1, test=100, head=1, fill=0)
    assert len(choose_exits(engine, early, ids, dear)) == 1


def test_exits_are_chosen_where_none_are_given(make_model, shortcuts) -> None:
    for name in ("llama", "opt"):
        fast = accelerate(make_model(name), shortcuts, mode="exit", policy=FixedLayer(2))
        assert set(fast._exit_early.layers) <= {1, 2}
        again = accelerate(make_model(name), shortcuts, mode="exit", policy=FixedLayer(2))
        assert again._exit_early.layers == fast._exit_early.layers


@pytest.mark.parametrize("fill", ["shortcut", "copy", "deferred"])
def test_prices_are_positive(small, shortcuts, fill) -> None:
    early = EarlyExit(shortcuts, TopProbability(0.5), [1, 2], fill, torch.arange(8))
    engine = make_engine(small)
    for prices in (weight_prices(engine, early), measured_prices(engine, early, rounds=2)):
        assert min(prices.layer, prices.test, prices.head) > 0
        assert (prices.fill == 0) == (fill == "deferred")
    assert engine.lengths == []
