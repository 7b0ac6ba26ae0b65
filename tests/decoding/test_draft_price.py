"""Drafts go as far as the expected tokens a second rise, and no further."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough.decoding import draft_price
from deepenough.decoding.api import speculate
from deepenough.decoding.draft_price import DraftPrice, DraftRecord, PassTimes, best_length
from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.decoding.lookup import LookupTable
from deepenough.decoding.request import SequenceState

CHANCES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def expected_ref(chances: list[float]) -> list[float]:
    """Expected tokens of a pass over 0, 1, 2 ... drafts, over all outcomes of each of them."""
    found = []
    for length in range(len(chances) + 1):
        total = 0.0
        for outcome in itertools.product([True, False], repeat=length):
            weight = 1.0
            for is_right, chance in zip(outcome, chances, strict=False):
                weight *= chance if is_right else 1 - chance
            run = next((n for n, is_right in enumerate(outcome) if not is_right), length)
            total += weight * (1 + run)
        found.append(total)
    return found


class Listed(Drafter):
    """Drafts with given probabilities."""

    def propose(self, rows, state_BD, engine) -> Proposal:
        raise NotImplementedError


def add(times: PassTimes, rows: int, seconds: float, first: int = 0) -> None:
    for _ in range(draft_price.FIRST):
        times.add(rows, first, seconds)


def chosen(times: list[float], chances: list[float]) -> int:
    """What the price chooses where passes took so long and the drafter knows its probabilities."""
    engine = SimpleNamespace(pass_times=PassTimes())
    for rows, seconds in enumerate(times, start=1):
        add(engine.pass_times, rows, seconds)
    drafter = Listed(len(chances))
    proposal = Proposal([[0] * len(chances)], probs=[chances], sources=[drafter])
    return DraftPrice().length(proposal, engine, 1)


@settings(max_examples=200, deadline=None)
@given(CHANCES, st.data())
def test_the_length_is_that_of_brute_force(chances, data) -> None:
    times = data.draw(st.lists(st.floats(0.1, 9), min_size=7, max_size=7))
    tokens = expected_ref(chances)
    # The rate is that of passes without drafts, as nothing else is known.
    values = [tokens[k] - times[k] / times[0] for k in range(len(tokens))]
    found = chosen(times, chances)
    assert values[found] == pytest.approx(max(values), abs=1e-9)
    # The pass is at least as fast as one without drafts.
    assert tokens[found] / times[found] >= (1 - 1e-9) / times[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANCES, min_size=2, max_size=4), st.lists(st.floats(0.1, 3), min_size=7))
def test_repeated_choices_reach_the_best_rate_of_all(kinds, times) -> None:
    """With the rate of the choices before, they become the best of all combinations."""
    tables = [expected_ref(chances) for chances in kinds]
    times = sorted(times)[:7]

    def rate(lengths) -> float:
        tokens = sum(table[k] for table, k in zip(tables, lengths, strict=True))
        return tokens / sum(times[k] for k in lengths)

    best = max(map(rate, itertools.product(*(range(len(table)) for table in tables))))
    now = rate([0] * len(kinds))
    for _ in range(20):
        now = rate([best_length(table, times[: len(table)], now) for table in tables])
    assert now == pytest.approx(best, rel=1e-9)


def test_dear_rows_and_bad_drafts_are_not_drafted() -> None:
    assert chosen([1, 1, 1, 1], [0.1, 0.1, 0.1]) == 3  # rows that cost nothing
    assert chosen([1, 2, 3, 4], [0.99, 0.99, 0.99]) == 0  # as much as a pass without drafts
    assert chosen([1, 1.3, 1.6, 1.9], [0.9, 0.6, 0.1]) == 2
    assert chosen([1, 1.3, 1.6, 1.9], [0.2, 0.9, 0.9]) == 0
    assert chosen([1, 1.9, 1.95, 2.0], [0.8, 0.9, 0.9]) == 3  # the first row pays by the others


def test_times_of_passes_are_robust_and_optimistic() -> None:
    times = PassTimes()
    assert times.seconds(1) == 0
    for seconds in (9.0, 1.0, 1.0, 8.0, 1.0):  # a neighbour was at work
        times.add(1, 0, seconds)
    assert times.seconds(1) == times.seconds(5) == 1.0
    times.add(3, 0, 7.0)
    assert times.seconds(3) == 1.0  # once may be chance
    add(times, 3, 2.0)
    assert times.seconds(3) == 2.0 and times.seconds(7) == 4.0
    add(times, 9, 1.5)  # more rows are never taken to be cheaper than fewer
    assert times.seconds(11) == 1.5
    add(times, 1, 0.5, first=4)  # a pass that begins behind some layers is another
    assert times.seconds(1) == 1.0 and times.seconds(1, 4) == 0.5


def test_a_busy_neighbour_slows_all_passes_alike() -> None:
    """Passes of one kind alone tell how slow the machine is, and others are judged by that."""
    times = PassTimes()
    for slow in (1.0, 5.0, 0.2):
        for _ in range(20):
            times.add(1, 0, slow)
        for rows, seconds in ((2, 1.5), (3, 2.0)):
            add(times, rows, slow * seconds)
            assert times.seconds(rows) == pytest.approx(seconds, rel=0.02)
        assert times.level == pytest.approx(slow, rel=0.02)
        assert times.seconds(1) == pytest.approx(1.0, rel=0.02)


def judged(record: DraftRecord, drafts: list[int], probs: list[float], written: list[int]) -> None:
    row = SequenceState(0, [], [0])
    record.add([row], Proposal([drafts], probs=[probs]), 2, 0.0)
    for token in written:
        record.judge()
        row.append(token)
    record.judge()


def test_probabilities_are_corrected_by_what_was_right() -> None:
    record = DraftRecord(3)
    assert record.accepted(0, 0.9) == pytest.approx(0.9)
    for _ in range(400):
        judged(record, [1, 2, 3], [0.9, 0.9, 0.4], [1, 5, 3])
    assert record.accepted(0, 0.9) > 0.98
    assert record.accepted(1, 0.9) < 0.1
    assert record.accepted(2, 0.4) == pytest.approx(0.4)  # behind a wrong one nothing is learned
    assert record.accepted(0, 0.4) == pytest.approx(0.4)
    assert record.reach == pytest.approx([1.0, 0.0, 0.0], abs=1e-3)
    for _ in range(400):  # it forgets
        judged(record, [1, 2], [0.9, 0.9], [4])
    assert record.accepted(0, 0.9) < 0.1


def test_a_draft_is_judged_once_its_text_is_written() -> None:
    record = DraftRecord(2)
    judged(record, [1, 2], [0.5, 0.5], [1])
    assert not record.cells
    judged(record, [1, 2], [0.5, 0.5], [3])
    assert list(record.cells.values()) == [(0.0, 1.0)]


@pytest.mark.parametrize("cost", [1e-6, 10.0])
def test_a_drafter_that_takes_long_is_asked_now_and_then(cost) -> None:
    engine = SimpleNamespace(pass_times=PassTimes())
    record, price, asked = DraftRecord(2), DraftPrice(), 0
    assert price.wanted(record, engine, 1) == 0  # passes without drafts come first
    for _ in range(draft_price.FIRST):
        price.add(engine, 1, 0, (0.0, 1.0), 1)
    for turn in range(300):
        if price.wanted(record, engine, 1):
            asked += 1
            row = SequenceState(0, [], [0], tokens=[])
            record.add([row], Proposal([[1, 2]], probs=[[0.5, 0.5]]), 2, cost)
            row.append(3 + turn)
    rare = draft_price.ASKED_FIRST + 300 // draft_price.PROBE
    assert asked == 300 if cost < 1 else draft_price.ASKED_FIRST <= asked <= rare


def test_lengths_are_tried_one_after_the_other() -> None:
    """Rows of unknown cost are tried, however little a draft promises, but not all at once."""
    engine = SimpleNamespace(pass_times=PassTimes())
    add(engine.pass_times, 1, 1.0)
    price, drafter, lengths = DraftPrice(), Listed(4), []
    proposal = Proposal([[1] * 4], probs=[[0.3] * 4], sources=[drafter])
    for _ in range(12):
        lengths.append(price.length(proposal, engine, 1))
        engine.pass_times.add(1 + lengths[-1], 0, 1.0)
    assert lengths == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_what_does_not_pay_is_tried_again() -> None:
    engine = SimpleNamespace(pass_times=PassTimes())
    for rows, seconds in ((1, 1.0), (2, 5.0)):
        add(engine.pass_times, rows, seconds)
    price, drafter = DraftPrice(), Listed(1)
    proposal = Proposal([[1]], probs=[[0.9]], sources=[drafter])
    lengths = [price.length(proposal, engine, 1) for _ in range(2 * draft_price.PROBE + 2)]
    assert sum(lengths) == 2 and set(lengths) == {0, 1}
    for _ in range(draft_price.KEPT):
        engine.pass_times.add(2, 0, 1.1)
    lengths = [price.length(proposal, engine, 1) for _ in range(2 * draft_price.PROBE + 4)]
    assert lengths.count(0) == 2


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_do_not_depend_on_time(make_model, prompts, monkeypatch, rows, sampled) -> None:
    """Times of any kind lead to other drafts, and to the same tokens."""
    small = make_model(eos_token_id=None)
    options = {"max_new_tokens": 50, "do_sample": sampled, "return_dict_in_generate": True}
    options |= {"temperature": 0.6, "top_k": 0} if sampled else {}
    torch.manual_seed(5)
    expected = small.generate(**prompts(rows), **options).sequences
    table = LookupTable(expected.tolist())
    texts, drafted = [], set()
    for seed in range(4):
        noise = random.Random(seed)
        seconds = lambda _, rows, first=0, noise=noise: 1 + rows * noise.random()  # noqa: E731
        monkeypatch.setattr(PassTimes, "seconds", seconds)
        fast = speculate(small, "lookup", table=table)
        torch.manual_seed(5)
        output = fast.generate(**prompts(rows), **options)
        texts.append(output.sequences.tolist())
        drafted.add((output.drafted, output.passes))
    assert all(text == texts[0] for text in texts)
    assert len(drafted) > 1
    if rows == 1 or not sampled:
        assert texts[0] == expected.tolist()
