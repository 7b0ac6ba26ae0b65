"""Bad input ends with exit code 2 and one clear sentence, and takes nothing with it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepenough.__main__ import main

Tiny = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


def flags(command: str, settings: dict[str, Any]) -> list[str]:
    return ["par", command, *(f"--{name}={value}" for name, value in settings.items())]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail, and returns its sentence."""

    def run(words: list[str]) -> str:
        capsys.readouterr()
        assert main(words) == 2
        shown = capsys.readouterr()
        *announced, line = shown.err.splitlines()  # such as what was held out of the text
        assert shown.out == "" and not any("rror" in each for each in announced)
        sentence = line.removeprefix("deepenough: error: ")
        assert sentence != line and sentence.endswith((".", "?"))
        return sentence

    return run


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("originals")


@pytest.fixture
def finished(tmp_path: Path, originals: Path, tiny: Tiny) -> Path:
    """The folder of a finished training, one's own copy."""
    if not (originals / "run").exists():
        settings = tiny(originals / "run", {"model.pattern": "da"}, steps=8)
        assert main(flags("train", settings)) == 0
    return Path(shutil.copytree(originals / "run", tmp_path / "run"))


# -- text ------------------------------------------------------------------------------------


def test_a_corpus_that_is_not_there(tmp_path: Path, tiny: Tiny, refused: Refused) -> None:
    wrong = {"data": str(tmp_path / "nothing.txt")}
    sentence = refused(flags("search", tiny(tmp_path / "run", wrong)))
    assert "nothing.txt" in sentence and "no file, folder or glob" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n" * 50, "no text that a tokenizer could be trained on"),
        ("A short one.\n", "split of the corpus"),
    ],
)
def test_a_corpus_that_gives_too_little(
    tmp_path: Path, tiny: Tiny, refused: Refused, text: str, said: str
) -> None:
    (tmp_path / "text.txt").write_text(text)
    wrong = {"data": str(tmp_path / "text.txt")}
    assert said in refused(flags("train", tiny(tmp_path / "run", wrong)))
    assert not (tmp_path / "run").exists()


def test_a_corpus_shorter_than_one_batch(tmp_path: Path, tiny: Tiny, refused: Refused) -> None:
    sentence = refused(flags("train", tiny(tmp_path / "run", {"dataset.batch_size": 5000})))
    assert "one batch of 5000 x 8 needs 40001: give a longer text or lower batch_size" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"fine\nb\xffd\n", "is not UTF-8 text (line 2): give a text file, or convert it"),
        (b"fine\nb\x00d\n", "is not text (line 2 holds a NUL byte): give a UTF-8 text file"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "is not UTF-8 text (line 1)"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "is not text (line 1 holds a NUL byte)"),
        (b"\x58\x00\x00\x00\x00\x00\x00\x00{}", "is not text (line 1 holds a NUL byte)"),
    ],
    ids=["latin-1", "nul", "image", "zip", "safetensors"],
)
def test_what_is_no_text_is_refused_by_name(
    tmp_path: Path, tiny: Tiny, refused: Refused, content: bytes, said: str
) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(content)
    sentence = refused(flags("train", tiny(tmp_path / "run", {"data": str(path)})))
    assert sentence.startswith(f"{path} {said}")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_large_is_what_the_text_can_give_and_held_out_text_is_announced(
    tmp_path: Path, tiny: Tiny, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path / "run", {"dataset.vocab_size": 100_000, "model.pattern": "d"})
    assert main(flags("train", settings | {"train.steps": 1})) == 0
    said = capsys.readouterr().err
    pieces = re.search(r"The vocabulary has (\d+) pieces, not 100000", said)
    assert pieces is not None
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == int(pieces[1])
    for split in ("valid", "test"):
        held_out = rf"The {split} split is (\d+) lines held out of {text_file}, evenly"
        found = re.search(held_out, said)
        assert found is not None and 30 <= int(found[1]) <= 40  # a twentieth of 700


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "wrong", "said"),
    [
        ("train", {"dataset.vocab_size": 10}, "set vocab_size to more than"),
        ("train", {"model.cutoffs": [200, 60]}, "cutoffs [200, 60] are not sorted"),
        ("train", {"model.cutoffs": [60, 60]}, "not sorted and distinct"),
        ("train", {"model.cutoffs": [60, 400]}, "must lie between 1 and 399"),
        ("train", {"model.cutoffs": [0]}, "each of model.cutoffs must be at least 1: got 0"),
        ("train", {"model.num_heads": 3}, "3 heads do not divide the width 16"),
        ("train", {"model.pattern": "axd"}, "unknown letter 'x'"),
        ("train", {"model.pattern": "a*"}, "unknown letter '*'"),
        ("train", {"model.pattern": "---"}, "has no block"),
        ("search", {"model.pattern": "adad"}, "leaves nothing to search"),
        ("search", {"model.pattern": "*x"}, "unknown letter 'x'"),
        ("search", {"model.num_blocks": 0}, "model.num_blocks must be at least 1"),
        ("search", {"search.tau_end": 0}, "search.tau_end must be above 0"),
        ("search", {"search.budget": -1}, "search.budget must be above 0"),
        ("search", {"search.budget": 0.01, "search.cost": "flops"}, "needs a budget of"),
        ("search", {"search.held_out": 1.0}, "search.held_out must be above 0 and below 1"),
        ("train", {"train.steps": "many"}, "--train.steps must be a whole number, not 'many'"),
        ("train", {"train.lr": "fast"}, "--train.lr must be a number"),
        ("train", {"train.schedule": "zigzag"}, "--train.schedule must be cosine or linear"),
        ("train", {"model.cutoffs": "wide"}, "--model.cutoffs must be a list"),
        ("train", {"model.depth": 3}, "There is no option --model.depth"),
        ("train", {"train.betas": [0.9]}, "train.betas must be two numbers"),
        (
            "train",
            {"dataset.valid_fraction": 0.9, "dataset.test_fraction": 0.2},
            "together below 1",
        ),
        ("train", {"model.dropout": 1.5}, "model.dropout must be at least 0 and below 1"),
        ("train", {"resume": True, "overwrite": True}, "either resumed or overwritten"),
        ("train", {"start": "nowhere"}, "There is no model in nowhere"),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, tiny: Tiny, refused: Refused, command: str, wrong: dict[str, Any], said: str
) -> None:
    assert said in refused(flags(command, tiny(tmp_path / "run", wrong)))
    assert not (tmp_path / "run").exists()


# -- run folders -----------------------------------------------------------------------------


def test_a_folder_in_use_is_not_touched(tiny: Tiny, refused: Refused, finished: Path) -> None:
    before = content(finished)
    sentence = refused(flags("train", tiny(finished, {"model.pattern": "da"}, steps=8)))
    assert "--resume" in sentence and "--overwrite" in sentence
    assert content(finished) == before


def test_a_folder_of_other_things_is_not_overwritten(
    tmp_path: Path, tiny: Tiny, refused: Refused
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    for how in ("overwrite", "resume"):
        refused(flags("train", tiny(folder, {f"{how}": True})))
    assert content(folder) == {"chapter.tex": b"years of work"}


@pytest.mark.parametrize(
    "wrong", [{"data": "/nowhere.txt"}, {"model.num_heads": 3}, {"dataset.batch_size": 9999}]
)
def test_overwriting_with_bad_settings_keeps_the_old_run(
    tiny: Tiny, refused: Refused, finished: Path, wrong: dict[str, Any]
) -> None:
    before = content(finished)
    refused(flags("train", tiny(finished, {"overwrite": True} | wrong)))
    assert content(finished) == before


def test_a_checkpoint_of_another_configuration(
    tiny: Tiny, refused: Refused, finished: Path
) -> None:
    before = content(finished)
    wrong = {"model.pattern": "da", "resume": True, "model.d_ff": 64}
    sentence = refused(flags("train", tiny(finished, wrong, steps=8)))
    assert "model.d_ff was 32 and is now 64" in sentence
    assert content(finished) == before


def test_checkpoints_cut_short(
    tiny: Tiny, refused: Refused, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest: the one before it serves. All of them: nothing is begun anew unasked."""
    settings = tiny(finished, {"model.pattern": "da", "resume": True}, steps=8)
    older, newest = sorted((finished / "checkpoints").iterdir())
    metrics = (finished / "metrics.jsonl").read_text()
    cut(newest / "optimizers.safetensors")
    assert main(flags("train", settings)) == 0
    assert f"{newest.name} cannot be read: going on from step 4" in caplog.text
    assert len((finished / "metrics.jsonl").read_text().splitlines()) == len(metrics.splitlines())
    for checkpoint in (older, newest):
        cut(checkpoint / "model.safetensors")
    before = content(finished)
    sentence = refused(flags("train", settings))
    assert "No checkpoint" in sentence and "damaged or truncated" in sentence
    assert content(finished) == before


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def test_resuming_a_finished_run_harms_nothing(tiny: Tiny, finished: Path) -> None:
    before = content(finished)
    settings = tiny(finished, {"model.pattern": "da", "resume": True}, steps=8)
    assert main(flags("train", settings)) == 0
    after = content(finished)
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"training.log"}


def test_a_loss_that_is_no_number(
    tmp_path: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that throws weights out of range, with a checkpoint from before."""
    folder = tmp_path / "run"
    settings = tiny(folder, {"model.pattern": "ad"}, lr=1e30, clip=0.0, warmup=0, save_every=1)
    assert main(flags("train", settings)) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "so training stopped" in shown and "lower train.lr" in shown
    assert not (folder / "model").exists()


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eval", "generate", "derive"])
def test_a_run_that_is_not_there(tmp_path: Path, refused: Refused, command: str) -> None:
    assert str(tmp_path / "no") in refused(["par", command, str(tmp_path / "no")])


def test_a_training_is_no_search(refused: Refused, finished: Path) -> None:
    assert "holds no search" in refused(["par", "derive", str(finished)])


def test_a_model_that_is_damaged(refused: Refused, finished: Path) -> None:
    cut(finished / "model" / "model.safetensors")
    shutil.rmtree(finished / "checkpoints")  # which would give the weights
    said = refused(["par", "generate", str(finished)])
    assert "model.safetensors is not the file that was saved" in said
