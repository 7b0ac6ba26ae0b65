"""The protocol of a comparison, watched through candidates that only count."""

import math
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deepenough.artifacts import FinishedParts
from deepenough.compare import protocol
from deepenough.compare.config import CompareConfig
from deepenough.compare.protocol import count_flops, measure
from deepenough.errors import UserError
from deepenough.measurement import (
    ComparedTask,
    Interval,
    OperatingPoint,
    Scores,
    median_interval,
    perplexity_interval,
    share_interval,
)


class Clock:
    """Advances by a millisecond whenever it is read, and by what candidates say they take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def read(self) -> float:
        self.seconds += 0.001
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of the clock of the protocol."""
    own = Clock()
    monkeypatch.setattr(protocol, "time", types.SimpleNamespace(perf_counter=own.read))
    return own


class Sleeper:
    """Takes as long as its points say, and keeps a diary."""

    mechanism = "sleep"
    task = ComparedTask("sleeping", "night", "all", "hour", "rest", True)

    def __init__(
        self, name: str, milliseconds: list[float], diary: list[str], clock: Clock | None = None
    ) -> None:
        self.name, self.times, self.diary = name, milliseconds, diary
        self.clock = clock or Clock()

    def points(self):
        return [OperatingPoint(f"{t:g}", {"ms": t}) for t in self.times]

    def run(self, point):
        self.diary.append(f"{self.name}{point.name}")
        self.clock.seconds += point.settings["ms"] / 1000
        return point.settings["ms"]

    def judge(self, point, answers):
        self.diary.append(f"judge {self.name}{point.name}")
        return Scores(Interval(answers, answers, answers), 2, 1.0, 10.0)


def test_points_take_turns_and_are_judged_outside_of_the_clock(clock):
    diary: list[str] = []
    one, two = Sleeper("a", [4, 8], diary, clock), Sleeper("b", [2], diary, clock)
    steps: list[tuple[int, int]] = []
    found, _ = measure([one, two], CompareConfig(rounds=6), lambda *step: steps.append(step))
    # Warming up, judging and counting come first, point by point.
    assert diary[:9] == ["a4", "judge a4", "a4", "a8", "judge a8", "a8", "b2", "judge b2", "b2"]
    rounds = [diary[9 + 3 * i : 12 + 3 * i] for i in range(6)]
    assert len(diary) == 9 + 18
    assert all(sorted(each) == ["a4", "a8", "b2"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # the order is drawn anew
    assert steps[-1][0] <= steps[-1][1] == 3 * 7
    first, slow, _ = found
    for end in ("", "_low", "_high"):
        assert slow[f"milliseconds{end}"] == pytest.approx(4.5)  # 9 ms over 2 units
        assert first[f"relative_time{end}"] == 1.0
    assert slow["relative_time"] == pytest.approx(9 / 5)


def test_bookkeeping_is_measured(clock):
    sleeper = Sleeper("a", [20, 10], [], clock)
    found, bookkeeping = measure([sleeper], CompareConfig(rounds=6, count_flops=False))
    assert found[0]["flops_counted"] is None
    # Between two passes the clock is read once more, and so at the end of every round.
    assert bookkeeping == pytest.approx(0.001 * 6 * (2 + 1) / (6 * (0.021 + 0.011)))


def test_an_interrupted_comparison_measures_only_what_is_missing(tmp_path, clock):
    config, diary = CompareConfig(rounds=3, count_flops=False), []
    whole, _ = measure([Sleeper("a", [20, 10], [], clock)], config)

    class Interrupted(Sleeper):
        def run(self, point):
            if len(diary) == 7:  # both were run and judged, and the first round is timed
                raise KeyboardInterrupt
            return super().run(point)

    parts = FinishedParts(tmp_path, "compare", config)
    with pytest.raises(KeyboardInterrupt):
        measure([Interrupted("a", [20, 10], diary, clock)], config, parts=parts)
    diary.clear()
    found, _ = measure([Sleeper("a", [20, 10], diary, clock)], config, parts=parts)
    assert len(diary) == 2 + 2 * 2  # a pass of each to warm up, then two rounds
    for row, expected in zip(found, whole, strict=True):
        assert row["quality"] == expected["quality"] and row["units"] == expected["units"]
        assert row["milliseconds"] == pytest.approx(expected["milliseconds"])
    parts.close()
    assert list(tmp_path.iterdir()) == []


def test_flops_are_counted_by_torch():
    class Product(Sleeper):
        def run(self, point):
            return torch.ones(3, 4) @ torch.ones(4, 5)

    product = Product("p", [1], [])
    assert count_flops(product, product.points()[0]) == 2 * 3 * 4 * 5


def test_the_median_lies_between_two_rounds():
    # Of 9 rounds the second lowest and the second highest: 1 - 2 (1 + 9) / 512 = 96.1 %.
    values = [5.0, 1.0, 2.0, 9.0, 3.0, 4.0, 6.0, 7.0, 100.0]
    assert median_interval(values) == Interval(5.0, 2.0, 9.0)
    assert median_interval([3.0, 1.0]) == Interval(2.0, 1.0, 3.0)
    assert median_interval([3.0]) == Interval(3.0, 3.0, 3.0)


@given(st.integers(6, 60))
def test_the_coverage_is_the_binomial_one_and_the_tightest(num):
    low = int(median_interval(range(1, num + 1)).low)
    assert 1 - 2 * stats.binom.cdf(low - 1, num, 0.5) >= 0.95
    assert 1 - 2 * stats.binom.cdf(low, num, 0.5) < 0.95


def test_wilson_is_honest_where_all_are_right():
    interval = share_interval(20, 20)
    assert interval.value == interval.high == 1.0
    assert interval.low == pytest.approx(stats.binomtest(20, 20).proportion_ci(method="wilson").low)
    none = share_interval(0, 10)
    assert none.low == 0.0 < none.high < 0.4
    half = share_interval(50, 100)
    ci = stats.binomtest(50, 100).proportion_ci(method="wilson")
    assert (half.low, half.high) == pytest.approx((ci.low, ci.high))


def test_perplexity_is_of_the_whole_text():
    losses, tokens = [2.0 * 10, 3.0 * 30], [10, 30]
    interval = perplexity_interval(losses, tokens)
    assert interval.value == pytest.approx(math.exp(110 / 40))
    assert interval.low == pytest.approx(math.exp(2.0))
    assert interval.high == pytest.approx(math.exp(3.0))
    assert perplexity_interval([8.0] * 4, [4] * 4) == pytest.approx((math.exp(2),) * 3)
    assert perplexity_interval([5000.0], [1]).value == math.inf


def test_a_quality_that_is_no_number_is_refused_before_it_is_timed(clock):
    diary: list[str] = []
    with pytest.raises(UserError, match="quality of a at inf is inf"):
        measure([Sleeper("a", [math.inf], diary, Clock())], CompareConfig(rounds=3))
    assert diary == ["ainf", "judge ainf"]
