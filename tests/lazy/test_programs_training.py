"""Learning to Execute: trained, resumed, measured by difficulty, through the same commands."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deepenough.cli.lazy import eval as eval_command
from deepenough.cli.lazy import train as train_command
from deepenough.errors import UserError
from deepenough.lazy.programs import Program
from deepenough.lazy.programs_training import exact_by
from deepenough.runs import read_records

TINY = {
    "task": "programs",
    "data.kinds": "[addition,copy,program]",
    "data.batch_size": 8,
    "data.eval_size": 30,
    "data.nesting": 1,
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


def run_training(folder: Path, **changes) -> None:
    values = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    words = [f"--{name}={value}" for name, value in values.items()]
    assert train_command.main([*words, f"--run.folder={folder}"]) == 0


def losses(folder: Path) -> list[float]:
    records, _ = read_records(folder / "metrics.jsonl")
    return [record.values["loss"] for record in records if record.kind == "train"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "run"
    run_training(folder)
    return folder


def test_a_training_is_measured_by_exact_match(run):
    records, _ = read_records(run / "metrics.jsonl")
    test = next(record.values for record in records if record.kind == "test")
    assert {"loss", "exact", "exact_addition", "exact_copy", "exact_program"} <= set(test)
    assert 0.0 <= test["exact"] <= 1.0
    assert losses(run)[-1] < losses(run)[0]


def test_a_resumed_training_is_the_uninterrupted_one(run, tmp_path):
    folder = tmp_path / "cut"
    run_training(folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    for path in (*newest.iterdir(), *(folder / "model").iterdir()):
        path.unlink()
    newest.rmdir()
    (folder / "model").rmdir()
    run_training(folder, run__resume="true")
    assert losses(folder) == losses(run)


def test_eval_tells_every_difficulty_also_beyond_training(run, capsys):
    assert eval_command.main([str(run), "--length", "5", "--nesting", "2"]) == 0
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
    rows = exact_by(programs, [True, False, False, True])
    assert [(row["kind"], row["length"], row["exact"]) for row in rows] == [
        ("addition", 1, 0.0),
        ("copy", 1, 0.5),
        ("copy", 2, 1.0),
    ]


def test_its_tokenizer_is_saved_with_it(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(tokenizer.encode("for x in range(3):a+=1")) == "for x in range(3):a+=1"


def test_an_unknown_task_and_a_task_of_other_options_are_refused(tmp_path):
    with pytest.raises(UserError, match="There is no task 'summaries': choose translation, progr"):
        train_command.main(["--task", "summaries"])
    with pytest.raises(UserError, match=r"no option --data\.target"):
        train_command.main(["--task=programs", "--data.target", "de"])
    with pytest.raises(UserError, match=r"data\.kinds is empty"):
        train_command.main(["--task=programs", "--data.kinds", "[]"])
