"""A finished translator in use: lines, evaluation, sweeps, and the commands for them."""

import csv
import io
from pathlib import Path

import pytest
import sacrebleu
import torch
from transformers import AutoConfig

from deepenough.data.translation import Pair
from deepenough.errors import UserError
from deepenough.figure import Run
from deepenough.hf.loading import from_pretrained
from deepenough.lazy.config import BeamSearchConfig, LazyEvalConfig
from deepenough.lazy.evaluation import (
    bleu_by_length,
    evaluate,
    measure_encoder,
    measured_epsilons,
    measured_pairs,
)
from deepenough.lazy.figures import grid_figure, step_grid
from deepenough.lazy.inference import load_translator, translate_lines
from deepenough.par.modeling import ParConfig, ParForCausalLM
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
    values = evaluate(LazyEvalConfig(str(run), search=BeamSearchConfig(beams=1)))
    assert values["sentences"] == 40
    assert values["encoder_depth"] == 3.0
    assert "tok:13a" in values["signature"]
    stopping = BeamSearchConfig(beams=1, epsilon=1.0, patience=2)
    sooner = evaluate(LazyEvalConfig(str(run), test="test_b", search=stopping))
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
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 3
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
    halting = [r.values for r in records if r.kind == "epsilons"][-3:]  # of this sweep
    assert [v["encoder_steps"] for v in halting] == [3, 3, 3]
    table = list(csv.DictReader((run / "sweep.csv").read_text().splitlines()))
    assert [float(row["bleu"]) for row in table] == [v["bleu"] for v in grid + halting]
    assert [row["encoder_steps"] for row in table] == ["2", "2", "5", "5", "3", "3", "3"]
    assert [float(row["epsilon"]) for row in table[4:]] == [v["epsilon"] for v in halting]


@pytest.mark.parametrize("halt_on", ["gate", "angle"])
def test_the_epsilons_of_a_sweep_fit_what_tokens_halt_by(make_run, halt_on):
    run = make_run(encoder_steps=8)
    translator = load_translator(str(run))
    pairs = measured_pairs(LazyEvalConfig(str(run)), translator)
    epsilons = measured_epsilons(translator.model, pairs.batch(range(32)), halt_on)
    depths = [
        measure_encoder(
            translator.model, pairs, BeamSearchConfig(epsilon=epsilon, halt_on=halt_on)
        )["encoder_depth"]
        for epsilon in epsilons
    ]
    assert depths == pytest.approx([6, 4.8, 4], abs=0.5)


def test_angles_are_smaller_than_gates_and_baselines_have_none(make_run):
    run = make_run(encoder_steps=8)
    model = load_translator(str(run)).model
    sample = {"input_ids": torch.arange(4, 20)[None], "decoder_input_ids": torch.ones(1, 1).long()}
    by_gate, by_angle = (measured_epsilons(model, sample, name) for name in ("gate", "angle"))
    assert by_angle != by_gate
    universal = load_translator(str(make_run(mechanism="universal"))).model
    assert measured_epsilons(universal, sample) == []


def test_epsilons_can_be_given_or_left_out(lazy, run, capsys):
    words = ["--beams", "1", "--sentences", "4", "--encoder_steps", "[]", "--halt_on", "angle"]
    assert lazy("sweep", run, *words, "--epsilons", "[0.5,1]") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2
    last = read_records(run / "metrics.jsonl")[0][-1].values
    assert (last["epsilon"], last["halt_on"], last["encoder_depth"]) == (1.0, "angle", 1.0)
    with pytest.raises(UserError, match="The grid is empty"):
        lazy("sweep", run, *words, "--epsilons", "[]")


def test_what_was_written_is_kept_with_every_score(lazy, run, capsys):
    assert lazy("eval", run, "--beams", "1", "--test", "test_b") == 0
    values = read_records(run / "metrics.jsonl")[0][-1].values
    hypotheses = (run / "hypotheses.txt").read_text().splitlines()
    pairs = measured_pairs(LazyEvalConfig(str(run), test="test_b"), load_translator(str(run)))
    references = [pair.target for pair in pairs.pairs]
    assert len(hypotheses) == len(references) == 40
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert values["bleu"] == pytest.approx(expected.score)
    assert values["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)
    assert "nc:6|nw:0" in values["chrf_signature"]
    (group,) = values["bleu_by_length"]
    assert group == {"source_words": "1 to 10", "sentences": 40, "bleu": values["bleu"]}


def test_bleu_by_length_groups_sources_by_their_words():
    pairs = [Pair("a " * words, "one two three four five") for words in (1, 10, 11, 40, 41, 90)]
    texts = ["one two three four five", "six", *["one two three four five"] * 4]
    rows = bleu_by_length(pairs, texts)
    assert [(row["source_words"], row["sentences"]) for row in rows] == [
        ("1 to 10", 2),
        ("11 to 20", 1),
        ("31 to 40", 1),
        ("above 40", 2),
    ]
    assert rows[0]["bleu"] == sacrebleu.corpus_bleu(texts[:2], [[pairs[0].target] * 2]).score
    assert [row["bleu"] for row in rows[1:]] == pytest.approx([100.0] * 3)


def test_length_formulas_can_be_chosen(run):
    power, gnmt = (
        BeamSearchConfig(length_penalty=0.6, length_formula=name).generation()["length_penalty"]
        for name in ("power", "gnmt")
    )
    assert 10**power == 10**0.6
    assert 10**gnmt == 2.5**0.6


def test_a_model_of_another_method_is_refused_in_a_sentence(lazy, run, tmp_path):
    torch.manual_seed(0)
    par = ParForCausalLM(ParConfig(vocab_size=40, d_model=16, num_heads=2, d_ff=16, pattern="ad"))
    par.save_pretrained(tmp_path / "par")
    for words in (["translate"], ["plot"], ["generate"]):
        with pytest.raises(UserError, match="is a ParForCausalLM, "):
            lazy(words[0], tmp_path / "par", *words[1:])
    with pytest.raises(UserError, match="which does not continue text"):
        lazy("generate", run, "a man")


def test_a_type_that_nothing_has_registered_is_of_another_kind(tmp_path):
    """As a lazy run is to a command of another method, which does not load lazy models."""
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UserError, match="is of a kind that is not known here: give another"):
        from_pretrained(AutoConfig, str(tmp_path), "model")


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
        evaluate(LazyEvalConfig(str(run), split="valid", test="test_b"))
    with pytest.raises(UserError, match="has no split 'train2'"):
        evaluate(LazyEvalConfig(str(run), split="train2"))
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


def test_programs_are_swept_by_exact_match(lazy, programs_run, capsys):
    words = ["--encoder_steps", "[2,4]", "--decoder_steps", "[2]", "--sentences", "5"]
    assert lazy("sweep", programs_run, *words, "--epsilons", "[1]") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    table = list(csv.DictReader((programs_run / "sweep.csv").read_text().splitlines()))
    assert [row["encoder_depth"] for row in table] == ["2.0", "4.0", "1.0"]
    assert {row["programs"] for row in table} == {"5"}
    assert all(0 <= float(row["exact"]) <= 1 for row in table)
    swept = Run("lazy", read_records(programs_run / "metrics.jsonl")[0], {}, path="r")
    figure = grid_figure(swept)
    assert figure is not None and figure.title == "Exact match by number of steps"
    assert step_grid(swept).keys() == {(2, 2), (4, 2)}
    assert lazy("eval", programs_run) == 0
    assert len((programs_run / "hypotheses.txt").read_text().splitlines()) == 12


def test_a_settings_file_may_name_the_run(lazy, programs_run, tmp_path, capsys):
    config = tmp_path / "eval.yaml"
    config.write_text(f"run: {programs_run}\nlength: 1\n")
    assert lazy("eval", "--config", str(config)) == 0
    assert "exact" in capsys.readouterr().out
