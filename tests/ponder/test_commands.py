"""`deepenough ponder` from labelled texts to answers and pictures, as a user runs it."""

import json
from pathlib import Path

import pytest

from deepenough.__main__ import main
from deepenough.errors import UserError
from deepenough.ponder.evaluation import FinishedRun
from deepenough.ponder.halting import ConfidenceExit, QuantileExit
from deepenough.ponder.inspection import open_inspector
from deepenough.runs import read_records


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, reviews: Path, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "ponder"
    words = ["--data", str(reviews), "--encoder", str(tiny_bert), "--out", str(folder)]
    sizes = [
        "--batch-size",
        "8",
        "--epochs",
        "4",
        "--lr",
        "0.01",
        "--warmup",
        "5",
        "--head-lr",
        "1",
    ]
    own = ["--halting-head", "answer", "--halting-target", "0.4", "--pooling", "mean"]
    assert main(["ponder", "train", *words, *sizes, *own]) == 0
    return folder


def test_eval_prints_and_keeps_the_frontier(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ponder", "eval", str(run), "--exit.threshold", "0.6"]) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "passes" in printed
    assert f"next: deepenough ponder plot {run}" in printed
    kinds = [record.kind for record in read_records(run / "metrics.jsonl")[0]]
    assert kinds.count("ponder_exit") > 20
    assert main(["ponder", "plot", str(run)]) == 0
    assert {path.suffix for path in (run / "plots").iterdir()} >= {".png", ".pdf"}


def test_predictions_of_a_file_are_json_lines_in_its_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reviews.txt"
    file.write_text("a good film\nthe plot so awful\na fine plot\n", encoding="utf-8")
    assert main(["ponder", "predict", str(run), str(file), "--batch-size", "2"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["label"] for answer in answers] == ["1", "0", "1"]
    for answer in answers:
        assert 0.5 <= answer["probability"] <= 1 and 1 <= answer["passes"] <= 3


def test_a_seed_repeats_the_draws_of_the_sampled_exit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reviews.txt"
    file.write_text("a good film\n" * 40, encoding="utf-8")
    printed = []
    for seed in ("1", "1", "2"):
        words = ["--exit.exit", "sampled", "--exit.seed", seed]
        assert main(["ponder", "predict", str(run), str(file), *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.append([json.loads(line)["passes"] for line in lines])
    assert printed[0] == printed[1] != printed[2]


def test_other_examples_are_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "more.csv"
    file.write_text("text,label\na good film,1\nso awful,0\na bad plot,0\n")
    assert main(["ponder", "eval", str(run), "--data", str(file)]) == 0
    assert "examples                3\n" in capsys.readouterr().out


def test_an_empty_line_has_no_label_and_moves_no_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reviews.txt"
    file.write_text("\na good film\n \n\nthe plot so awful\na fine plot\n\n\n", encoding="utf-8")
    assert main(["ponder", "predict", str(run), str(file), "--batch-size", "2"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    labels = [answer["label"] for answer in answers]
    assert labels == [None, "1", None, None, "0", "1", None, None]
    assert answers[0] == {"label": None, "probability": None, "passes": 0}


def test_parity_leaves_accuracy_by_difficulty(tmp_path: Path) -> None:
    folder = tmp_path / "parity"
    words = ["--out", str(folder), "--size", "8", "--train-nonzero", "4", "--width", "8"]
    assert main(["ponder", "parity", *words, "--steps", "20", "--max-passes", "4"]) == 0
    bands = [r.values for r in read_records(folder / "metrics.jsonl")[0] if r.kind == "parity"]
    assert {band["beyond"] for band in bands} == {True, False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--data", "/nowhere.csv"], "no file or folder /nowhere.csv"),
        (
            ["train", "--halting-target", "1.5", "--data", "{reviews}"],
            "halting_target must be above 0",
        ),
        (["eval", "/nowhere"], "/nowhere"),
        (["predict", "{run}", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["predict", "{run}", "{file}", "--exit.threshold", "2"], "above 0 and at most 1"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str],
    said: str,
    run: Path,
    reviews: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "one.txt"
    file.write_text("a good film\n", encoding="utf-8")
    given = [word.format(run=run, reviews=reviews, file=file) for word in words]
    if given[0] == "train":
        given += ["--out", str(tmp_path / "run")]
    assert main(["ponder", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("deepenough: error: ") and said in error
    assert len(error.splitlines()) == 1


def test_an_inspector_shows_every_pass_and_stops_as_predict_does(run: Path) -> None:
    found = open_inspector(str(run))
    finished = FinishedRun(str(run))
    exit_class = QuantileExit if "halted" in found.dial else ConfidenceExit
    for threshold in (0.05, 0.6, 1.0):
        section = found.look("a good film", threshold)
        panel = section.figures[0].panels[0]
        policy = exit_class(threshold)
        (answer,) = finished.model.predict(["a good film"], finished.tokenizer, policy=policy)
        assert section.findings[0].startswith(f"{answer.label}, with probability")
        stop = answer.passes - 1
        assert panel.framed == [(0, stop), (1, stop)]
        row = panel.rows.index(str(answer.label))
        assert panel.values[row][stop] == pytest.approx(answer.probability, abs=1e-5)
        assert sum(panel.values[2]) == pytest.approx(1.0, abs=1e-5)  # of halting
    with pytest.raises(UserError, match="empty"):
        found.look("", 0.5)
