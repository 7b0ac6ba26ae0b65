"""A look inside a lazy model: what is recorded, what is drawn of it, what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from deepenough.errors import UserError
from deepenough.lazy.config import ProgramConfig
from deepenough.lazy.inspection import open_inspector
from deepenough.lazy.programs import held_out_programs
from deepenough.runs import read_records


@pytest.fixture(scope="module")
def run(make_run) -> Path:
    return make_run()


def last(run: Path, kind: str) -> dict:
    return [r.values for r in read_records(run / "metrics.jsonl")[0] if r.kind == kind][-1]


def test_a_sentence_of_the_split_is_drawn_with_all_its_numbers(lazy, run, lines, capsys):
    words = ["--beams", "1", "--sentences", "4", "--encoder_steps", "[2,4]"]
    lazy("sweep", run, *words, "--decoder_steps", "[2,3]")
    capsys.readouterr()
    assert lazy("plot", run, "--sentence", "1", "--epsilon", "0.5") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = {path.stem for path in written}
    assert {"lazy_tokens", "lazy_sentence", "lazy_steps"} <= names
    assert {path.suffix for path in written} == {".png", ".pdf", ".svg", ".json"}
    assert all(path.parent == run / "plots" and path.stat().st_size > 100 for path in written)
    tokens = last(run, "lazy_tokens")
    assert tokens["source"] == tokens["target"] == lines[1]
    for side, num_steps in (("encoder", 4), ("decoder", 2)):
        part = tokens[side]
        assert len(part["gates"]) == len(part["similarity"]) == len(part["tokens"])
        assert all(len(row) == num_steps for row in part["gates"])
        assert len(part["sentence"]) == num_steps
    assert len(tokens["encoder"]["depth"]) == len(tokens["encoder"]["tokens"])
    data = json.loads((run / "plots" / "lazy_tokens.data.json").read_text())
    gates = tokens["encoder"]["gates"]
    assert data["panels"][0]["values"] == [pytest.approx(row, rel=1e-4) for row in gates]


def test_frames_are_the_steps_that_tokens_make(lazy, run, capsys):
    assert lazy("plot", run, "--epsilon", "1.0") == 0
    assert set(last(run, "lazy_tokens")["encoder"]["depth"]) == {1}


@pytest.mark.parametrize(("compare", "epsilon"), [("state", 0.1), ("update", 0.25)])
def test_without_an_epsilon_it_is_one_that_fits_the_gates(lazy, make_run, capsys, compare, epsilon):
    run = make_run(compare=compare)
    assert lazy("plot", run) == 0
    assert last(run, "lazy_tokens")["epsilon"] == epsilon


def test_a_sentence_that_is_given_is_translated(lazy, run, tmp_path, capsys):
    assert lazy("plot", run, "--source", "two red dogs", "--out", str(tmp_path / "pictures")) == 0
    tokens = last(run, "lazy_tokens")
    assert tokens["source"] == "two red dogs" and isinstance(tokens["target"], str)
    assert (tmp_path / "pictures" / "lazy_tokens.svg").is_file()


def test_a_model_without_gates_has_similarities(lazy, make_run, capsys):
    run = make_run(mechanism="universal")
    assert lazy("plot", run) == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert {"lazy_tokens", "lazy_sentence"} <= names
    assert "gates" not in last(run, "lazy_tokens")["encoder"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epsilon", "0"], "epsilon must be above 0"),
        (["--sentence", "40"], "has 40 pairs, counted from 0: got 40"),
        (["--sentence=-1"], "sentence must be at least 0: got -1"),
        (["--source", " "], "The source is empty"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(lazy, run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        lazy("plot", run, *words)


def test_programs_are_looked_at_as_sentences_are(lazy, programs_run, capsys):
    assert lazy("plot", programs_run, "--sentence", "2") == 0
    names = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert {"lazy_tokens", "lazy_sentence"} <= names
    expected = held_out_programs(ProgramConfig(length=2, eval_size=12), "test", 0)
    tokens = last(programs_run, "lazy_tokens")
    assert (tokens["source"], tokens["target"]) == (expected[2].source, expected[2].target)
    assert "".join(tokens["encoder"]["tokens"][:-1]) == tokens["source"]


def test_another_program_is_executed_by_the_model_itself(lazy, programs_run, capsys):
    assert lazy("plot", programs_run, "--source", "print(1+2).") == 0
    tokens = last(programs_run, "lazy_tokens")
    assert tokens["source"] == "print(1+2)."
    assert len(tokens["decoder"]["tokens"]) >= 1


def test_the_model_of_a_run_is_drawn_into_the_run(lazy, run, tmp_path, capsys):
    assert lazy("plot", str(run / "model")) == 0
    assert str(run / "plots" / "lazy_tokens.png") in capsys.readouterr().out
    shutil.copytree(run / "model", tmp_path / "alone" / "model")
    with pytest.raises(UserError, match="give the folder of a run"):
        lazy("plot", str(tmp_path / "alone" / "model"))


def test_an_inspector_translates_and_shows_who_has_halted(run):
    found = open_inspector(str(run))
    section = found.look("two red dogs", 1.0)
    (figure,) = section.figures
    gates = figure.panels[0]
    assert all(step == 0 for _, step in gates.framed)  # as bold as can be: all halt at once
    assert "halt before step 4; on average a token makes 1.0 steps" in section.findings[1]
    careful = found.look("two red dogs", 1e-9)
    assert "0 of " in careful.findings[1]
    with pytest.raises(UserError, match="empty"):
        found.look(" ", found.usual)
