"""A short part of `make fuzz`: the same cases every time, and what a defect would look like."""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepenough.errors import UserError
from tests.fuzz.__main__ import BytesRandom, Outcomes, run_hypothesis, run_kind
from tests.fuzz.kinds import KINDS, Kind, World, check_page_text
from tests.fuzz.mutations import damage, mutate

CASES = {"command": 40, "config": 30, "prompts": 60, "page": 120, "metrics": 120}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_ends_with_a_result_or_a_sentence(kind: str, world: World) -> None:
    found = run_kind(KINDS[kind], CASES.get(kind, 500), seed=1, world=world)
    assert not found.bad
    assert found.cases and found.refused < found.cases, "every case is refused: none is nearly good"


def check(case: int, world: World) -> None:
    if case == 1:
        raise UserError("It was refused.")
    if case == 2:
        raise KeyError("a traceback")
    if case == 3:
        time.sleep(5)
    assert case != 4, "accepted, and wrong"


def test_defects_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.__main__.LIMIT", 0.2)
    numbers = iter(range(5))
    kind = Kind("toy", 5, lambda rng, world: next(numbers), check)
    found: Outcomes = run_kind(kind, 5, world=world)
    assert (found.cases, found.refused) == (5, 1)
    names = sorted(what.partition(" ")[0] for what in found.bad)
    assert names == ["AssertionError", "Hang", "KeyError"]


def test_hypothesis_shrinks_what_it_finds(world: World) -> None:
    def refuse_large(case: int, world: World) -> None:
        assert case < 1000, f"found {case}"

    kind = Kind("toy", 1, lambda rng, world: rng.randrange(10**6), refuse_large)
    with pytest.raises(AssertionError, match=r"found 1000\b"):
        run_hypothesis(kind, 200, world)


def test_bytes_make_choices() -> None:
    assert BytesRandom(b"").random() == 0.0
    one, other = (mutate(BytesRandom(seed * 40), {"a": [1, 2]}) for seed in (b"\x01", b"\xf3"))
    assert one != other


def test_mutations_change_something_and_leave_the_original() -> None:
    tree = {"a": [1, {"b": "c"}], "d": None}
    changed = [repr(mutate(random.Random(seed), tree)) for seed in range(200)]
    assert tree == {"a": [1, {"b": "c"}], "d": None}
    assert len(set(changed)) > 100
    assert len({damage(random.Random(seed), b"some bytes") for seed in range(200)}) > 100


@pytest.mark.parametrize(
    "text", ["<img src=x>", "<p onclick='x'>", '<a href="javascript:x">x</a>', "\0", "\ud800"]
)
def test_a_page_with_markup_in_it_is_noticed(text: str) -> None:
    with pytest.raises((AssertionError, UnicodeEncodeError)):
        check_page_text(f'<p>{text}</p><script type="application/json">[]</script>')
