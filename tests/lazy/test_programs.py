"""Learning to Execute: programs print what Python prints, and what is held out stays out."""

import contextlib
import io

import pytest

from deepenough.errors import UserError
from deepenough.lazy.programs import ProgramData, held_out, make_programs, split_of
from deepenough.lazy.programs_batches import POOL, ProgramBatches
from deepenough.lazy.programs_tokens import character_tokenizer

ALL = ["addition", "copy", "program"]


def executed(program: str) -> str:
    """What Python prints of it, a statement a line and without the final stop."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.removesuffix(".").replace(";", "\n"), {})
    return printed.getvalue().strip() + "."


@pytest.mark.parametrize("nesting", [1, 3, 6])
def test_programs_print_what_python_prints(nesting):
    data = ProgramData(kinds=["program"], length=4, nesting=nesting)
    for program in make_programs(data, 200, seed=1):
        assert executed(program.source) == program.target, program.source
        assert len(program.source) < data.max_length
        assert program.nesting <= nesting and program.length <= 4


def test_programs_have_all_kinds_of_control_flow():
    data = ProgramData(["program"], 3, 4)
    text = " ".join(program.source for program in make_programs(data, 200, 0))
    assert all(part in text for part in (" if ", "for x in range(", "*", "-", "+=", "="))


def test_additions_by_python():
    programs = list(make_programs(ProgramData(length=6), 100, seed=2))
    assert all(executed(program.source) == program.target for program in programs)
    lengths = {len(program.source) for program in programs}
    assert min(lengths) < 12 < max(lengths)


def test_a_copy_is_the_same():
    data = ProgramData(["copy"], length=9, fixed=True)
    for program in make_programs(data, 20, seed=3):
        assert program.target == f"{program.source}." and len(program.source) == 9


def test_answers_last_digit_first():
    plain = list(make_programs(ProgramData(ALL), 20, seed=0))
    reverse = list(make_programs(ProgramData(ALL, reverse=True), 20, seed=0))
    for one, other in zip(plain, reverse, strict=True):
        assert one.source == other.source
        assert one.target[:-1] == other.target[:-1][::-1] and other.target.endswith(".")


def test_samples_follow_from_seed_and_place():
    data = ProgramData(["program"])
    assert list(make_programs(data, 5, 0)) == list(make_programs(data, 9, 0))[:5]
    assert list(make_programs(data, 5, 0)) != list(make_programs(data, 5, 1))


def test_what_is_held_out_is_never_trained_on():
    data = ProgramData(ALL, length=2, nesting=1, eval_size=50)
    trained = {program.source for program in make_programs(data, 3000, seed=0)}
    assert len(trained) > 1000
    for split in ("valid", "test"):
        found = held_out(data, split, seed=0)
        sources = {program.source for program in found}
        assert len(found) == len(sources) == 50
        assert not sources & trained
        assert all(split_of(program) == split for program in found)
        assert {program.kind for program in found} == set(ALL)


def test_fewer_are_held_out_where_there_are_not_so_many():
    data = ProgramData(length=1, eval_size=1000)
    assert 1 <= len(held_out(data, "test", 0)) < 20


def test_every_character_is_a_token():
    tokenizer = character_tokenizer()
    for program in make_programs(ProgramData(ALL, nesting=6), 200, seed=0):
        ids = tokenizer.encode(program.source, add_special_tokens=False)
        assert len(ids) == len(program.source)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == program.source
    assert tokenizer.encode("#", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_batches_follow_from_seed_and_place_and_never_come_again():
    data = ProgramData(ALL, batch_size=8)
    tokenizer = character_tokenizer()

    def texts(batches, index):
        pairs, rows = batches.batch(index)
        return tokenizer.batch_decode([pairs.source[row] for row in rows])

    whole = ProgramBatches(data, tokenizer, seed=0)
    seen = [texts(whole, index) for index in range(POOL + 2)]
    assert all(len(batch) == 8 for batch in seen)
    assert texts(ProgramBatches(data, tokenizer, seed=0), POOL + 1) == seen[POOL + 1]
    assert texts(ProgramBatches(data, tokenizer, seed=1), 3) != seen[3]
    assert sorted(seen[0]) != sorted(seen[POOL])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"length": 0}, "data.length must be at least 1"),
        ({"nesting": 0}, "data.nesting must be at least 1"),
        ({"nesting": 26}, "only 25 names"),
        ({"kinds": []}, "data.kinds is empty"),
        ({"batch_size": 0}, "data.batch_size must be at least 1"),
    ],
)
def test_programs_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        list(make_programs(ProgramData(**changes), 1, 0))


def test_a_split_that_is_not_held_out_is_refused():
    with pytest.raises(UserError, match="held out for valid and test: got 'train'"):
        held_out(ProgramData(), "train", 0)
