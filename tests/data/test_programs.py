"""Learning to Execute: what programs print is what Python prints."""

import contextlib
import io

import pytest

from deepenough.data.programs import ProgramData, make_pairs
from deepenough.errors import UserError


def executed(program: str) -> str:
    """What Python prints of it, a statement a line and without the final stop."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.removesuffix(".").replace(";", "\n"), {})
    return printed.getvalue().strip() + "."


@pytest.mark.parametrize("nesting", [1, 3, 6])
def test_programs_print_what_python_prints(nesting):
    data = ProgramData(task="program", length=4, nesting=nesting)
    for pair in make_pairs(data, 200, seed=1):
        assert executed(pair.source) == pair.target, pair.source


def test_programs_have_all_kinds_of_control_flow():
    text = " ".join(pair.source for pair in make_pairs(ProgramData("program", 3, 4), 200, 0))
    assert all(part in text for part in (" if ", "for x in range(", "*", "-", "+=", "="))


def test_additions_by_python():
    pairs = list(make_pairs(ProgramData(length=6), 100, seed=2))
    assert all(executed(pair.source) == pair.target for pair in pairs)
    lengths = {len(pair.source) for pair in pairs}
    assert min(lengths) < 12 < max(lengths)


def test_a_copy_is_the_same():
    pairs = list(make_pairs(ProgramData("copy", length=9, fixed=True), 20, seed=3))
    assert all(pair.source == pair.target and len(pair.source) == 9 for pair in pairs)


def test_samples_follow_from_seed_and_place():
    data = ProgramData("program")
    assert list(make_pairs(data, 5, 0)) == list(make_pairs(data, 9, 0))[:5]
    assert list(make_pairs(data, 5, 0)) != list(make_pairs(data, 5, 1))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"length": 0}, "data.length must be at least 1"),
        ({"nesting": 0}, "data.nesting must be at least 1"),
        ({"nesting": 26}, "only 25 names"),
    ],
)
def test_programs_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        list(make_pairs(ProgramData(**changes), 1, 0))
