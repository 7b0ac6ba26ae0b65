"""A finished translator in use: lines, evaluation, sweeps, and the commands for them."""

import io
from pathlib import Path

import pytest
import torch

from deepenough.cli.lazy import eval as eval_command
from deepenough.cli.lazy import sweep as sweep_command
from deepenough.cli.lazy import translate as translate_command
from deepenough.config import dump
from deepenough.data.tokenizer import save_tokenizer
from deepenough.data.translation import TranslationData, open_parallel
from deepenough.data.translation_pairs import joint_tokenizer
from deepenough.errors import UserError
from deepenough.lazy.evaluation import (
    LazyEvaluation,
    evaluate,
    load_translator,
    measure_encoder,
    measured_pairs,
    translate_lines,
)
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.training import LazyTraining, make_model
from deepenough.lazy.translate_score import SearchSettings
from deepenough.runs import read_records

LINES = ["a man rides a red bike", "a woman walks her dog", "two dogs", "a red dog walks"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, shared_cache) -> Path:
    """The folder of a run, as training leaves it, with a model that has learned nothing."""
    corpus = tmp_path_factory.mktemp("parallel")
    for split in ("train", "val", "test_a", "test_b"):
        (corpus / f"{split}.en").write_text("\n".join(LINES * 10))
        (corpus / f"{split}.de").write_text("\n".join(LINES * 10))
    settings = LazyTraining(
        data=TranslationData(
            corpus=str(corpus), vocab_size=285, max_length=24, cache=str(shared_cache)
        ),
        model=LazySettings(d_model=16, num_heads=2, d_ff=32, encoder_steps=3, decoder_steps=2),
    )
    text = open_parallel(settings.data)
    tokenizer = joint_tokenizer(text, settings.data)
    torch.manual_seed(0)
    model = make_model(settings.model, tokenizer, settings.data.max_length)
    folder = tmp_path_factory.mktemp("run")
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    dump(settings, folder / "config.yaml")
    (folder / "metrics.jsonl").touch()
    return folder


def test_lines_are_translated_in_order_and_alone_as_together(run):
    translator = load_translator(str(run))
    search = SearchSettings(beams=2)
    lines = [LINES[0], "", LINES[2], "  ", LINES[1]]
    together = list(translate_lines(translator, lines, search, at_once=4))
    assert len(together) == 5
    assert together[1] == together[3] == ""
    assert together == list(translate_lines(translator, lines, search, at_once=1))


def test_a_line_beyond_the_limit_is_cut(run, caplog):
    translator = load_translator(str(run))
    assert len(list(translate_lines(translator, ["a dog " * 50], SearchSettings(beams=1)))) == 1
    assert "input: 1 of 1 pairs are longer than 24 tokens and were cut." in caplog.messages


def test_the_command_reads_standard_input(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a man\n\ntwo dogs\n")))
    assert translate_command.main([str(run), "--beams", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1] == ""


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_a_line_is_a_line_whatever_stands_in_it(run, tmp_path, monkeypatch, capsys, caplog, way):
    text = "\ufefftwo dogs\r\n".encode() + b"a man\rrides\n\xdcbel dog\n\xff\n"
    (tmp_path / "lines").write_bytes(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    given = [str(tmp_path / "lines")] if way == "file" else []
    assert translate_command.main([str(run), *given, "--beams", "1"]) == 0
    written = capsys.readouterr().out.split("\n")
    assert len(written) == 5 and written[-1] == ""
    alone = translate_lines(load_translator(str(run)), ["two dogs"], SearchSettings(beams=1))
    assert written[0] == next(alone)
    replaced = [line for line in caplog.messages if "not UTF-8" in line]
    assert len(replaced) == 1 and "line 3: what is not UTF-8 was replaced" in replaced[0]


def test_lines_of_two_bytes_a_character_are_refused(run, tmp_path):
    (tmp_path / "lines").write_text("two dogs\n", encoding="utf-16")
    with pytest.raises(UserError, match="lines is UTF-16 text: save it as UTF-8"):
        translate_command.main([str(run), str(tmp_path / "lines")])


def test_a_model_without_a_run_folder_translates(run):
    assert load_translator(str(run / "model")).model.config.d_model == 16


def test_evaluation_tells_bleu_depth_and_cost_and_is_recorded(run):
    values = evaluate(LazyEvaluation(str(run), search=SearchSettings(beams=1)))
    assert values["sentences"] == 40
    assert values["encoder_depth"] == 3.0
    assert "tok:13a" in values["signature"]
    stopping = SearchSettings(beams=1, epsilon=1.0, patience=2)
    sooner = evaluate(LazyEvaluation(str(run), test="test_b", search=stopping))
    assert sooner["encoder_depth"] == 2.0
    assert sooner["encoder_flops"] == pytest.approx(values["encoder_flops"] * 2 / 3)
    records, _ = read_records(run / "metrics.jsonl")
    assert [r.values["epsilon"] for r in records if r.kind == "translation"][-2:] == [0.0, 1.0]


def test_the_fastest_round_of_the_encoder_counts(run, monkeypatch):
    translator = load_translator(str(run))
    pairs = measured_pairs(LazyEvaluation(str(run)), translator)
    clock = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    values = measure_encoder(translator.model, pairs, SearchSettings(), 8, rounds=3)
    assert values["encoder_seconds"] == 2.0
    assert values["encoder_depth"] == 3.0  # counted once, not once a round


def test_a_sweep_prints_and_records_every_point(run, capsys):
    words = ["--beams", "1", "--sentences", "8", "--encoder_steps", "[2,5]"]
    words += ["--search.epsilon", "0.0", "--decoder_steps", "[2,3]", "--epsilons", "[0.0,1.0]"]
    assert sweep_command.main([str(run), *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 2
    records, _ = read_records(run / "metrics.jsonl")
    grid = [r.values for r in records if r.kind == "steps"]
    assert [(v["encoder_steps"], v["decoder_steps"]) for v in grid] == [
        (2, 2),
        (2, 3),
        (5, 2),
        (5, 3),
    ]
    curve = [r.values for r in records if r.kind == "epsilon"]
    assert curve[1]["encoder_depth"] == 1.0 < curve[0]["encoder_depth"]
    assert grid[0]["sentences"] == 8


def test_the_eval_command(run, capsys):
    assert eval_command.main([str(run), "--split", "valid", "--beams", "1"]) == 0
    assert "bleu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--encoder_steps", "[0]"], "encoder_steps must be at least 1"),
        (["--epsilons", "[3.0]"], r"epsilon must be in \[0, 1\]"),
        (["--encoder_steps", "[2,0]"], "encoder_steps must be at least 1"),
        (["--sentences", "0"], "sentences must be at least 1"),
        (["--batch_size", "0"], "batch_size must be at least 1"),
    ],
)
def test_sweeps_that_cannot_be_are_refused_before_they_begin(run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        sweep_command.main([str(run), *words])


def test_what_is_missing_is_said(run, tmp_path):
    with pytest.raises(UserError, match="There is no model in"):
        load_translator(str(tmp_path))
    with pytest.raises(UserError, match="batch_size must be at least 1: got 0"):
        evaluate(LazyEvaluation(str(run), batch_size=0))
    with pytest.raises(UserError, match="the valid split was asked for: leave one of them out"):
        evaluate(LazyEvaluation(str(run), split="valid", test="test_b"))
    with pytest.raises(UserError, match="has no split 'train2'"):
        evaluate(LazyEvaluation(str(run), split="train2"))
    with pytest.raises(UserError, match="rows must be at least 1"):
        list(translate_lines(load_translator(str(run)), ["a"], SearchSettings(), at_once=0))
