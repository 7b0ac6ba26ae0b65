"""`deepenough METHOD plot` from the words of a command line to files and sentences."""

from pathlib import Path

import pytest

from deepenough.cli import execute, parse_command
from deepenough.errors import UserError
from deepenough.report.commands import plot_command
from deepenough.runs import Metrics, Record, RunFolder


def plot(*words: Path | str) -> int:
    """Run `deepenough par plot` with these words."""
    command = plot_command("par")
    return execute(command, parse_command(command, "par plot", [str(word) for word in words]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the smallest search that has every picture."""
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
    assert plot(run) == 0
    printed = capsys.readouterr()
    files = sorted((run / "plots").iterdir())
    assert sorted(printed.out.splitlines()) == [str(path) for path in files]
    assert {path.name.split(".")[0] for path in files} == {"architecture", "blocks", "training"}
    assert {path.suffix for path in files} == {".gif", ".json", ".pdf", ".png", ".svg"}
    assert printed.err == ""


def test_the_folder_may_be_another(run: Path, tmp_path: Path) -> None:
    assert plot("--runs", f"[{run}]", "--out", tmp_path / "elsewhere") == 0
    assert (tmp_path / "elsewhere" / "blocks.gif").exists()
    assert not (run / "plots").exists()


def test_the_model_of_a_run_stands_for_the_run(run: Path) -> None:
    (run / "model").mkdir()
    assert plot(run / "model") == 0
    assert (run / "plots" / "training.png").exists()


def test_several_runs_are_drawn_over_one_another(run: Path, tmp_path: Path) -> None:
    second, out = write_run(tmp_path / "runs" / "second"), tmp_path / "both"
    assert plot(run, second, "--out", out) == 0
    assert {path.name.split(".")[0] for path in out.iterdir()} == {"training"}


def test_the_same_folder_twice_is_one_run(run: Path) -> None:
    assert plot(run, f"{run}/") == 0
    assert (run / "plots" / "blocks.png").exists()


def test_skipped_lines_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ki')
    assert plot(run) == 0
    assert "1 unreadable line(s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "at least one run folder"),
        (["{run}", "{other}"], "--out FOLDER"),
        (["{missing}"], "There is no run folder"),
        (["{empty}"], "has no record"),
        (["{bare}"], "nothing is recorded that can be drawn"),
        (["{bare}", "{bare2}", "--out", "{run}/both"], "nothing is recorded that can be drawn"),
        (["{run}", "--colour", "red"], "colour"),
        (["{run}", "--out", "{run}/metrics.jsonl"], "Cannot write into"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    other, empty = write_run(tmp_path / "other"), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    bare = [tmp_path / name for name in ("bare", "bare2")]
    for folder in bare:
        Metrics(RunFolder.create(folder).metrics).append(Record(1, "cost", {"attention": 1e-3}))
    places = {
        "bare": bare[0],
        "bare2": bare[1],
        "run": run,
        "other": other,
        "missing": tmp_path / "missing",
        "empty": empty,
    }
    with pytest.raises(UserError, match=sentence):
        plot(*(word.format(**places) for word in words))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot("--help")
    assert "deepenough par plot runs/first" in capsys.readouterr().out
