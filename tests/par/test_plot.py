"""`deepenough plot` from the words of a command line to files and sentences."""

from pathlib import Path

import pytest

from deepenough.__main__ import main
from deepenough.runs import Metrics, Record, RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The smallest search that has every picture."""
    return write_run(tmp_path / "runs" / "first")


def write_run(path: Path) -> Path:
    folder = RunFolder.create(path)
    folder.config.write_text("model: {d_model: 8}\n")
    metrics = Metrics(folder.metrics)
    for step in (1, 2, 3):
        pi = [[0.1 + 0.2 * step, 0.8 - 0.2 * step, 0.1], [0.1, 0.8, 0.1]]
        values = {"loss": 9.0 - step, "lr": 1e-3, "tau": 1.0, "entropy": 0.5, "pi": pi}
        metrics.append(Record(step, "train", values))
    return folder.path


def test_one_run_is_drawn_into_its_own_folder(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run)]) == 0
    printed = capsys.readouterr()
    files = sorted((run / "plots").iterdir())
    assert sorted(printed.out.splitlines()) == [str(path) for path in files]
    assert [path.name for path in files] == [
        "architecture.pdf", "architecture.png", "blocks.gif", "blocks.pdf", "blocks.png",
        "training.pdf", "training.png",
    ]  # fmt: skip
    assert printed.err == ""


def test_the_run_may_be_an_option_and_the_folder_another(run: Path, tmp_path: Path) -> None:
    assert main(["plot", "--run", str(run), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "blocks.gif").exists()
    assert not (run / "plots").exists()


def test_several_runs_are_drawn_over_one_another(run: Path, tmp_path: Path) -> None:
    second, out = write_run(tmp_path / "runs" / "second"), tmp_path / "both"
    assert main(["plot", str(run), str(second), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["training.pdf", "training.png"]


def test_the_same_folder_twice_is_one_run(run: Path) -> None:
    assert main(["plot", str(run), f"{run}/"]) == 0
    assert (run / "plots" / "blocks.png").exists()


def test_skipped_lines_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ki')
    assert main(["plot", str(run)]) == 0
    assert "1 unreadable line(s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "at least one run folder"),
        (["{run}", "{other}"], "--out FOLDER"),
        (["{missing}"], "There is no run folder"),
        (["{empty}"], "has no record"),
        (["{run}", "--colour", "red"], "--colour"),
        (["{run}", "--out", "{run}/metrics.jsonl"], "Cannot write pictures"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    other, empty = write_run(tmp_path / "other"), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    places = {"run": run, "other": other, "missing": tmp_path / "missing", "empty": empty}
    assert main(["plot", *(word.format(**places) for word in words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("deepenough: error: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--help"]) == 0
    assert "deepenough plot runs/first" in capsys.readouterr().out
