"""A finished translator in use: lines, evaluation, sweeps, and the commands for them."""

import io
from pathlib import Path

import pytest

from deepenough.errors import UserError
from deepenough.lazy.config import BeamSearchConfig, LazyEvalConfig
from deepenough.lazy.evaluation import (
    evaluate_translation,
    load_translator,
    measure_encoder,
    measured_pairs,
    translate_lines,
)
from deepenough.runs import read_records


@pytest.fixture(scope="module")
def run(make_run) -> Path:
    return make_run(encoder_steps=3)


def test_lines_are_translated_in_order_and_alone_as_together(run, lines):
    translator = load_translator(str(run))
    search = BeamSearchConfig(beams=2)
    given = [lines[0], "", lines[2], "  ", lines[1]]
    together = list(translate_lines(translator, given, search, at_once=4))
    assert len(together) == 5
    assert together[1] == together[3] == ""
    assert together == list(translate_lines(translator, given, search, at_once=1))


def test_a_line_beyond_the_limit_is_cut(run, caplog):
    translator = load_translator(str(run))
    assert len(list(translate_lines(translator, ["a dog " * 50], BeamSearchConfig(beams=1)))) == 1
    assert "input: 1 of 1 pairs are longer than 24 tokens and were cut." in caplog.messages


def test_the_command_reads_standard_input(lazy, run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a man\n\ntwo dogs\n")))
    assert lazy("translate", run, "--beams", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1] == ""


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_a_line_is_a_line_whatever_stands_in_it(
    lazy, run, tmp_path, monkeypatch, capsys, caplog, way
):
    text = "\ufefftwo dogs\r\n".encode() + b"a man\rrides\n\xdcbel dog\n\xff\n"
    (tmp_path / "lines").write_bytes(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    monkeypatch.setattr("deepenough.data.corpus._warned", set())  # other tests read it, too
    given = [str(tmp_path / "lines")] if way == "file" else []
    assert lazy("translate", run, *given, "--beams", "1") == 0
    written = capsys.readouterr().out.split("\n")
    assert len(written) == 5 and written[-1] == ""
    alone = translate_lines(load_translator(str(run)), ["two dogs"], BeamSearchConfig(beams=1))
    assert written[0] == next(alone)
    replaced = [line for line in caplog.messages if "not UTF-8" in line]
    assert len(replaced) == 1 and "the first in line 3: they were replaced" in replaced[0]


def test_lines_of_two_bytes_a_character_are_refused(lazy, run, tmp_path):
    (tmp_path / "lines").write_text("two dogs\n", encoding="utf-16")
    with pytest.raises(UserError, match="lines is UTF-16 text: save it as UTF-8"):
        lazy("translate", run, str(tmp_path / "lines"))


def test_a_model_without_a_run_folder_translates(run):
    assert load_translator(str(run / "model")).model.config.d_model == 16


def test_evaluation_tells_bleu_depth_and_cost_and_is_recorded(run):
    values = evaluate_translation(LazyEvalConfig(str(run), search=BeamSearchConfig(beams=1)))
    assert values["sentences"] == 40
    assert values["encoder_depth"] == 3.0
    assert "tok:13a" in values["signature"]
    stopping = BeamSearchConfig(beams=1, epsilon=1.0, patience=2)
    sooner = evaluate_translation(LazyEvalConfig(str(run), test="test_b", search=stopping))
    assert sooner["encoder_depth"] == 2.0
    assert sooner["encoder_flops"] == pytest.approx(values["encoder_flops"] * 2 / 3)
    records, _ = read_records(run / "metrics.jsonl")
    assert [r.values["epsilon"] for r in records if r.kind == "translation"][-2:] == [0.0, 1.0]


def test_the_fastest_round_of_the_encoder_counts(run, monkeypatch):
    translator = load_translator(str(run))
    pairs = measured_pairs(LazyEvalConfig(str(run)), translator)
    clock = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    values = measure_encoder(translator.model, pairs, BeamSearchConfig(), num_timings=3)
    assert values["encoder_seconds"] == 2.0
    assert values["encoder_depth"] == 3.0  # counted once, not once a round


def test_a_sweep_prints_and_records_every_point(lazy, run, capsys):
    words = ["--beams", "1", "--sentences", "8", "--encoder_steps", "[2,5]"]
    words += ["--decoder_steps", "[2,3]"]
    assert lazy("sweep", run, *words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4
    records, _ = read_records(run / "metrics.jsonl")
    grid = [r.values for r in records if r.kind == "steps"]
    assert [(v["encoder_steps"], v["decoder_steps"]) for v in grid] == [
        (2, 2),
        (2, 3),
        (5, 2),
        (5, 3),
    ]
    assert [v["encoder_depth"] for v in grid] == [2.0, 2.0, 5.0, 5.0]
    assert grid[0]["sentences"] == 8


def test_the_eval_command(lazy, run, capsys):
    assert lazy("eval", run, "--split", "valid", "--beams", "1") == 0
    assert "bleu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--encoder_steps", "[0]"], "encoder_steps must be at least 1"),
        (["--epsilon", "3.0"], "search.epsilon must be at least 0 and at most 1: got 3.0"),
        (["--encoder_steps", "[2,0]"], "encoder_steps must be at least 1"),
        (["--sentences", "0"], "sentences must be at least 1"),
    ],
)
def test_sweeps_that_cannot_be_are_refused_before_they_begin(lazy, run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        lazy("sweep", run, *words)


def test_what_is_missing_is_said(run, tmp_path):
    with pytest.raises(UserError, match="There is no model in"):
        load_translator(str(tmp_path))
    with pytest.raises(UserError, match="the valid split was asked for: leave one of them out"):
        evaluate_translation(LazyEvalConfig(str(run), split="valid", test="test_b"))
    with pytest.raises(UserError, match="has no split 'train2'"):
        evaluate_translation(LazyEvalConfig(str(run), split="train2"))
    with pytest.raises(UserError, match="rows must be at least 1"):
        list(translate_lines(load_translator(str(run)), ["a"], BeamSearchConfig(), at_once=0))


def test_baselines_are_swept_as_far_as_they_have_blocks(lazy, make_run, capsys):
    words = ["--beams", "1", "--sentences", "2", "--decoder_steps", "[1]"]
    assert lazy("sweep", make_run(mechanism="universal"), *words, "--encoder_steps", "[2]") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    unshared = make_run(mechanism="transformer")
    with pytest.raises(UserError, match="shares no block and has 4"):
        lazy("sweep", unshared, *words, "--encoder_steps", "[2,5]")
    assert {record.kind for record in read_records(unshared / "metrics.jsonl")[0]} == {"train"}


def test_a_sweep_is_for_translators(lazy, programs_run):
    with pytest.raises(UserError, match="was trained on programs, but a sweep measures BLEU"):
        lazy("sweep", programs_run)


def test_a_settings_file_may_name_the_run(lazy, programs_run, tmp_path, capsys):
    config = tmp_path / "eval.yaml"
    config.write_text(f"run: {programs_run}\nlength: 1\n")
    assert lazy("eval", "--config", str(config)) == 0
    assert "exact" in capsys.readouterr().out
