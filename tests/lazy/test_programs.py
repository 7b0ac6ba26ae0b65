"""Learning to Execute: programs print what Python prints, and what is held out stays out."""

import contextlib
import io
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deepenough.errors import UserError
from deepenough.lazy.config import ProgramConfig
from deepenough.lazy.programs import (
    POOL,
    Program,
    character_tokenizer,
    draw_pool,
    exact_by_difficulty,
    held_out_programs,
    make_programs,
    split_of,
)
from deepenough.runs import read_records

ALL = ["addition", "copy", "program"]


def executed(program: str) -> str:
    """What Python prints of it, a statement a line and without the final stop."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.removesuffix(".").replace(";", "\n"), {})
    return printed.getvalue().strip() + "."


@pytest.mark.parametrize("nesting", [1, 3, 6])
def test_programs_print_what_python_prints(nesting):
    data = ProgramConfig(kinds=["program"], length=4, nesting=nesting)
    for program in make_programs(data, 200, seed=1):
        assert executed(program.source) == program.target, program.source
        assert len(program.source) < data.max_length
        assert program.nesting <= nesting and program.length <= 4


def test_programs_have_all_kinds_of_control_flow():
    data = ProgramConfig(["program"], 3, 4)
    text = " ".join(program.source for program in make_programs(data, 200, 0))
    assert all(part in text for part in (" if ", "for x in range(", "*", "-", "+=", "="))


def test_additions_by_python():
    programs = list(make_programs(ProgramConfig(length=6), 100, seed=2))
    assert all(executed(program.source) == program.target for program in programs)
    lengths = {len(program.source) for program in programs}
    assert min(lengths) < 12 < max(lengths)


def test_a_copy_is_the_same():
    data = ProgramConfig(["copy"], length=9)
    for program in make_programs(data, 20, seed=3):
        assert program.target == f"{program.source}." and len(program.source) <= 9


def test_answers_last_digit_first():
    plain = list(make_programs(ProgramConfig(ALL), 20, seed=0))
    reverse = list(make_programs(ProgramConfig(ALL, reverse=True), 20, seed=0))
    for one, other in zip(plain, reverse, strict=True):
        assert one.source == other.source
        assert one.target[:-1] == other.target[:-1][::-1] and other.target.endswith(".")


def test_samples_follow_from_seed_and_place():
    data = ProgramConfig(["program"])
    assert list(make_programs(data, 5, 0)) == list(make_programs(data, 9, 0))[:5]
    assert list(make_programs(data, 5, 0)) != list(make_programs(data, 5, 1))


def test_what_is_held_out_is_never_trained_on():
    data = ProgramConfig(ALL, length=2, nesting=1, eval_size=50)
    trained = {program.source for program in make_programs(data, 3000, seed=0)}
    assert len(trained) > 1000
    for split in ("valid", "test"):
        found = held_out_programs(data, split, seed=0)
        sources = {program.source for program in found}
        assert len(found) == len(sources) == 50
        assert not sources & trained
        assert all(split_of(program) == split for program in found)
        assert {program.kind for program in found} == set(ALL)


def test_fewer_are_held_out_where_there_are_not_so_many():
    data = ProgramConfig(length=1, eval_size=1000)
    assert 1 <= len(held_out_programs(data, "test", 0)) < 20


def test_every_character_is_a_token():
    tokenizer = character_tokenizer()
    for program in make_programs(ProgramConfig(ALL, nesting=6), 200, seed=0):
        ids = tokenizer.encode(program.source, add_special_tokens=False)
        assert len(ids) == len(program.source)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == program.source
    assert tokenizer.encode("#", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_batches_follow_from_seed_and_place_and_never_come_again():
    data = ProgramConfig(ALL, batch_size=8)

    def texts(seed, number):
        pairs, batches = draw_pool(data, character_tokenizer(), seed, number)
        return [[pairs.pairs[row].source for row in rows] for rows in batches]

    first, second = texts(0, 0), texts(0, 1)
    assert len(first) == len(second) == POOL
    assert all(len(batch) == 8 for batch in first + second)
    assert texts(0, 1) == second
    assert texts(1, 0) != first != second


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"nesting": 0}, "nesting must be at least 1"),
        ({"nesting": 26}, "nesting must be at least 1 and at most 25: got 26"),
        ({"kinds": []}, "dataset.kinds is empty"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_programs_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        list(make_programs(ProgramConfig(**changes), 1, 0))


def test_a_split_that_is_not_held_out_is_refused():
    with pytest.raises(UserError, match="held out for valid and test: got 'train'"):
        held_out_programs(ProgramConfig(), "train", 0)


# -- training and evaluation

TINY = {
    "task": "programs",
    "dataset.kinds": "[addition,copy,program]",
    "dataset.batch_size": 8,
    "dataset.eval_size": 30,
    "dataset.nesting": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.d_ff": 32,
    "model.encoder_steps": 2,
    "model.decoder_steps": 2,
    "train.steps": 6,
    "train.warmup": 2,
    "train.lr": 0.01,
    "train.log_every": 1,
    "train.valid_every": 6,
    "train.save_every": 3,
}


def run_training(lazy, folder: Path, **changes) -> None:
    values = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    words = [f"--{name}={value}" for name, value in values.items()]
    assert lazy("train", *words, "--out", folder) == 0


def losses(folder: Path) -> list[float]:
    records, _ = read_records(folder / "metrics.jsonl")
    return [record.values["loss"] for record in records if record.kind == "train"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, lazy) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "run"
    run_training(lazy, folder)
    return folder


def test_a_training_is_measured_by_exact_match(run):
    records, _ = read_records(run / "metrics.jsonl")
    test = next(record.values for record in records if record.kind == "test")
    assert {"loss", "exact", "exact_addition", "exact_copy", "exact_program"} <= set(test)
    assert 0.0 <= test["exact"] <= 1.0
    assert losses(run)[-1] < losses(run)[0]


def test_a_resumed_training_is_the_uninterrupted_one(lazy, run, tmp_path):
    folder = tmp_path / "cut"
    run_training(lazy, folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    for path in (*newest.iterdir(), *(folder / "model").iterdir()):
        path.unlink()
    newest.rmdir()
    (folder / "model").rmdir()
    run_training(lazy, folder, resume="true")
    assert losses(folder) == losses(run)


def test_eval_tells_every_difficulty_also_beyond_training(lazy, run, capsys):
    assert lazy("eval", run, "--length", "5", "--nesting", "2") == 0
    shown = capsys.readouterr().out
    assert "kind addition  nesting 1  length 5" in shown
    assert "exact copy" in shown
    record = read_records(run / "metrics.jsonl")[0][-1]
    assert record.kind == "programs" and record.values["length"] == 5
    rows = record.values["exact_by"]
    assert sum(row["programs"] for row in rows) == record.values["programs"] == 30


def test_exact_match_by_hand():
    programs = [
        Program("1", "1.", "copy", 1, 1),
        Program("print(1+1).", "2.", "addition", 1, 1),
        Program("2", "2.", "copy", 1, 1),
        Program("22", "22.", "copy", 2, 1),
    ]
    rows = exact_by_difficulty(programs, [True, False, False, True])
    assert [(row["kind"], row["length"], row["exact"]) for row in rows] == [
        ("addition", 1, 0.0),
        ("copy", 1, 0.5),
        ("copy", 2, 1.0),
    ]


def test_its_tokenizer_is_saved_with_it(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(tokenizer.encode("for x in range(3):a+=1")) == "for x in range(3):a+=1"


def test_an_unknown_task_and_a_task_of_other_options_are_refused(lazy):
    with pytest.raises(UserError, match="There is no task 'summaries': choose translation, progr"):
        lazy("train", "--task", "summaries")
    with pytest.raises(UserError, match=r"no option --dataset\.target"):
        lazy("train", "--task=programs", "--dataset.target", "de")
    with pytest.raises(UserError, match=r"dataset\.kinds is empty"):
        lazy("train", "--task=programs", "--dataset.kinds", "[]")


def test_options_of_another_task_than_the_runs_are_refused(lazy, programs_run, make_run):
    with pytest.raises(UserError, match="Option --run must be given; folder of a finished"):
        lazy("eval")
    with pytest.raises(UserError, match="was trained on programs, but test is an option of transl"):
        lazy("eval", programs_run, "--test", "test_b")
    with pytest.raises(UserError, match="was trained on translation, but nesting is an option of"):
        lazy("eval", make_run(), "--nesting", "2")
