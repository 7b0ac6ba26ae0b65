"""Runs of every method at their operating points, as training leaves them, only smaller."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.cli import parse_command
from deepenough.compare.commands import COMPARE
from deepenough.compare.config import CompareConfig
from deepenough.compare.frontier import compare
from deepenough.config import dump, resolve
from deepenough.data.config import TranslationDataConfig
from deepenough.data.tokenizer import save_tokenizer
from deepenough.data.translation import joint_tokenizer, open_parallel
from deepenough.decoding.native_weights import load_library
from deepenough.lazy.config import (
    LazyModelConfig,
    ProgramConfig,
    ProgramTrainConfig,
    TranslationTrainConfig,
)
from deepenough.lazy.programs import character_tokenizer
from deepenough.lazy.training import new_translator
from deepenough.par.config import ParTrainConfig
from deepenough.par.training import train as train_par
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.training import train as train_ponder
from deepenough.runs import read_records

#: All of one length, so that nothing is padded and the two counts of FLOPs can be equal.
SENTENCES = ["ein mann faehrt rad", "eine frau geht aus", "der hund geht aus", "ein hund geht rad"]


@pytest.fixture(scope="module")
def language(tmp_path_factory, text_file, shared_cache) -> Path:
    folder = tmp_path_factory.mktemp("language")
    values = {
        "out": str(folder / "run"),
        "data": str(text_file),
        "dataset.cache": str(shared_cache),
        "dataset.vocab_size": 400,
        "dataset.batch_size": 4,
        "dataset.length": 8,
        "model.pattern": "ad-",
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.d_ff": 32,
        "model.mem_len": 8,
        "train.steps": 4,
        "train.warmup": 1,
    }
    return train_par(resolve(ParTrainConfig, overrides=values)).path


@pytest.fixture(scope="module")
def labels(tmp_path_factory, reviews, tiny_bert) -> Path:
    values = {
        "out": str(tmp_path_factory.mktemp("labels") / "run"),
        "data": str(reviews),
        "dataset.batch_size": 8,
        "model.encoder": str(tiny_bert),
        "train.warmup": 1,
        "epochs": 0.2,
    }
    return train_ponder(resolve(PonderTrainConfig, overrides=values)).path


def small(mechanism: str) -> LazyModelConfig:
    return LazyModelConfig(
        mechanism, d_model=16, num_heads=2, d_ff=32, encoder_steps=3, decoder_steps=2
    )


def untrained(
    folder: Path, settings: TranslationTrainConfig | ProgramTrainConfig, tokenizer: Any
) -> Path:
    """A model that has learned nothing, in a folder as training leaves it."""
    torch.manual_seed(0)
    model = new_translator(settings.model, tokenizer, settings.dataset.max_length)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    dump(settings, folder / "config.yaml")
    (folder / "metrics.jsonl").touch()
    return folder


@pytest.fixture(scope="module")
def translators(tmp_path_factory, shared_cache) -> dict[str, Path]:
    """One of every mechanism."""
    corpus = tmp_path_factory.mktemp("parallel")
    for split in ("train", "val", "test_a"):
        for language in ("en", "de"):
            (corpus / f"{split}.{language}").write_text("\n".join(SENTENCES * 10))
    dataset = TranslationDataConfig(vocab_size=280, max_length=24, cache=str(shared_cache))
    tokenizer = joint_tokenizer(open_parallel(str(corpus), dataset), dataset)
    return {
        mechanism: untrained(
            tmp_path_factory.mktemp(mechanism),
            TranslationTrainConfig(data=str(corpus), dataset=dataset, model=small(mechanism)),
            tokenizer,
        )
        for mechanism in ("lazy", "universal", "act", "transformer")
    }


@pytest.fixture(scope="module")
def translator(translators) -> Path:
    return translators["lazy"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    settings = ProgramTrainConfig(
        dataset=ProgramConfig(length=2, eval_size=12), model=small("lazy")
    )
    return untrained(tmp_path_factory.mktemp("programs"), settings, character_tokenizer())


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    """Shortcuts of a tiny Llama."""
    folder = tmp_path_factory.mktemp("writer")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=64, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 30)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder / "llama")
    rows = torch.randint(1, 30, (200, 24), generator=torch.Generator().manual_seed(0)).tolist()
    text = "\n".join(" ".join(f"w{number}" for number in row) for row in rows)
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text(text)
    arguments = ["--data", str(folder), "--out", str(folder / "run")]
    assert main(["shortcut", "fit", str(folder / "llama"), *arguments]) == 0
    return folder / "run"


def compared(tmp_path: Path, *runs: Path, **changes: Any) -> dict[str, Any]:
    return compare(runs, **{"out": str(tmp_path / "out"), "rounds": 2} | changes)


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {point["name"]: point for point in content["points"]}


def test_language_models_over_lengths_of_memory(tmp_path, language):
    content = compared(tmp_path, language, limit=3)
    assert content["task"]["quality"] == "perplexity"
    points = by_name(content)
    assert list(points) == ["memory 8", "memory 4", "memory 2"]
    for point in points.values():
        assert point["layers"] == 2.0  # of `ad-` two are run
        assert point["flops"] == pytest.approx(point["flops_counted"], rel=1e-6)
        assert point["quality_low"] <= point["quality"] <= point["quality_high"]
        assert point["units"] == 3 * 4 * 8
    assert points["memory 8"]["flops"] > points["memory 4"]["flops"]
    assert points["memory 4"]["command"] == f"deepenough par eval {language} --mem_len 4"
    assert points["memory 4"]["folder"] == str(language)
    out = tmp_path / "out"
    assert content["command"] == f"deepenough compare {language} --limit=3 --out={out} --rounds=2"
    # The pass that is timed is the evaluation everyone knows.
    recorded = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert recorded["points"][0]["quality"] == points["memory 8"]["quality"]


def test_classifiers_over_ways_of_stopping(tmp_path, labels):
    grid = {"grid.threshold": [1.0, 0.01], "grid.passes": [3, 1], "grid.confidence": [0.6]}
    content = compared(tmp_path, labels, **grid, limit=16, batch_size=8)
    points = by_name(content)
    assert list(points) == ["3 passes", "1 pass", "halt 1", "halt 0.01", "sure 0.6"]
    for point in points.values():
        assert point["flops"] == pytest.approx(point["flops_counted"], rel=1e-6)
    assert points["3 passes"]["layers"] == points["halt 1"]["layers"] == 3.0
    assert points["3 passes"]["quality"] == points["halt 1"]["quality"]
    assert points["1 pass"]["layers"] == points["halt 0.01"]["layers"] == 1.0
    assert "layers" in points["1 pass"]["optimal"]
    asked = f"deepenough ponder eval {labels} --split valid --exit.exit quantile"
    assert points["halt 0.01"]["command"] == f"{asked} --exit.threshold 0.01"


def test_translators_over_epsilons_and_steps(tmp_path, translator):
    grid = {"grid.epsilon": [0.0, 0.9], "grid.steps": [1]}
    points = by_name(compared(tmp_path, translator, **grid, limit=4))
    assert list(points) == ["all steps", "1 step", "ε 0", "ε 0.9"]
    assert points["all steps"]["layers"] == points["ε 0"]["layers"] == 3.0 + 2.0
    assert points["1 step"]["layers"] == 1.0 + 2.0
    assert points["ε 0.9"]["flops"] < points["ε 0"]["flops"]
    for point in points.values():
        # Rows that have ended go on as padding, which torch counts.
        assert 0.5 < point["flops"] / point["flops_counted"] < 1.0 + 1e-6
    assert points["ε 0.9"]["command"] == (
        f"deepenough lazy eval {translator} --search.beams 1 --search.epsilon 0.9"
    )


def test_translators_without_a_grid(tmp_path, translator):
    points = by_name(compared(tmp_path, translator, limit=1, rounds=1))
    assert list(points) == ["all steps", "2 steps", "1 step", "ε 0.05", "ε 0.075", "ε 0.1"]


@pytest.mark.parametrize("mechanism", ["lazy", "universal", "act", "transformer"])
def test_both_counts_of_flops_agree_where_nothing_is_padded(tmp_path, translators, mechanism):
    grid = {"grid.epsilon": [0.5], "grid.steps": [1], "limit": 1, "rounds": 1}
    points = by_name(compared(tmp_path, translators[mechanism], **grid))
    assert len(points) == (3 if mechanism == "lazy" else 2)
    # Of ACT the trace leaves out the unit that says when to halt: one number a token and step.
    exactly = 0.01 if mechanism == "act" else 1e-6
    for point in points.values():
        assert point["flops"] == pytest.approx(point["flops_counted"], rel=exactly)


def test_programs_are_executed_and_both_counts_of_flops_agree(tmp_path, programs):
    grid = {"grid.epsilon": [0.5], "grid.steps": [1], "limit": 1, "rounds": 1}
    content = compared(tmp_path, programs, **grid)
    assert content["task"]["unit"] == "program" and content["task"]["quality"] == "exact match"
    for point in content["points"]:
        assert point["flops"] == pytest.approx(point["flops_counted"], rel=1e-6)


def test_writers_over_exits_agree_with_the_model_where_they_are_lossless(tmp_path, writer):
    shape = {"limit": 3, "prompt_tokens": 8, "new_tokens": 6}
    points = by_name(compared(tmp_path, writer, **shape, **{"grid.exit": [1.0, 0.0]}))
    assert list(points) == ["transformers", "full", "speculative", "exit 1", "exit 0"]
    for name in ("transformers", "full", "speculative"):
        assert points[name]["quality"] == 1.0
        assert points[name]["layers"] == 5.0
    assert points["exit 0"]["layers"] < 5.0
    assert points["exit 0"]["quality"] <= 1.0
    for point in points.values():
        if point["flops_counted"] is None:  # by compiled code
            assert point["name"] != "transformers" and load_library() is not None
            continue
        # A token is charged for a context that already includes it.
        assert point["flops"] == pytest.approx(point["flops_counted"], rel=0.02)
    assert points["transformers"]["command"] == ""
    assert f"--mode early_exit --shortcuts {writer}/shortcuts" in points["exit 0"]["command"]


def test_a_draft_head_takes_part_where_it_is_given(tmp_path, writer):
    model, tuned = writer.parent / "llama", tmp_path / "tuned"
    words = ["--text.tokens", "200", "--text.prompt_tokens", "8", "--text.new_tokens", "8"]
    words += ["--text.min_chars", "10"]
    words += ["--head.held_out", "2", "--head.epochs", "1", "--data", str(writer.parent)]
    assert main(["decode", "tune", str(model), *words, "--out", str(tuned)]) == 0
    shape = {"limit": 3, "prompt_tokens": 8, "new_tokens": 6}
    chosen = {"mechanisms": ["full", "tuned"], "tuned": str(tuned)}
    points = by_name(compared(tmp_path, writer, **shape, **chosen))
    assert list(points) == ["full", "tuned"]
    assert points["tuned"]["quality"] == 1.0
    assert points["tuned"]["flops"] > points["full"]["flops"]
    assert f"--mode speculative --draft_model {tuned}" in points["tuned"]["command"]


def test_drafts_that_are_not_there_are_asked_for(tmp_path, writer):
    with pytest.raises(UserError, match="give the folder that deepenough decode tune wrote"):
        compared(tmp_path, writer, mechanisms=["tuned"])


@pytest.mark.parametrize(
    "words",
    [
        ["runs/my own", "b", "--limit", "2", "--exit", "[0.6,0.3]", "--rounds", "6"],
        ["a b", "--mechanisms", "[full,exit]", "--count_flops", "false"],
    ],
)
def test_the_command_of_a_comparison_asks_for_the_same(words):
    def settings_of(given: list[str]) -> CompareConfig:
        return parse_command(COMPARE, "compare", given)

    settings = settings_of(words)
    program, command, *rest = shlex.split(settings.command())
    assert (program, command) == ("deepenough", "compare")
    assert settings_of(rest) == settings


def test_runs_of_different_tasks_are_refused_by_name(tmp_path, language, labels):
    with pytest.raises(UserError, match="language modelling") as error:
        compared(tmp_path, language, labels, limit=2)
    assert str(language) in str(error.value) and str(labels) in str(error.value)
    assert "classification" in str(error.value)


def test_a_run_half_written_is_refused_by_name(tmp_path, language):
    half = tmp_path / "half"
    shutil.copytree(language, half)
    shutil.rmtree(half / "model")
    with pytest.raises(UserError, match="half is not finished: it has no model"):
        compared(tmp_path, half)


@pytest.mark.parametrize("kind", ["language", "labels", "translator", "programs", "writer"])
def test_weights_that_are_not_there_are_said_with_the_run(tmp_path, request, kind):
    half = tmp_path / "half"
    shutil.copytree(request.getfixturevalue(kind), half)
    shutil.rmtree(half / "checkpoints", ignore_errors=True)
    removed = list(half.rglob("*.safetensors"))
    for path in removed:
        path.unlink()
    assert removed
    with pytest.raises(UserError, match="half"):
        compared(tmp_path, half, limit=1, rounds=1)


def test_the_command_prints_a_table_and_draws_the_chart(tmp_path, language, capsys):
    words = ["--out", str(tmp_path / "out"), "--limit", "2", "--rounds", "1", "--mem_len", "[4]"]
    assert main(["compare", str(language), *words]) == 0
    told = capsys.readouterr().out
    assert "memory 4" in told and "bookkeeping took" in told
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"frontier.json", "frontier_layers.png", "frontier_milliseconds.pdf"} <= names


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "nothing to compare"),
        (["nowhere"], "no run folder nowhere"),
        (["{run}", "--rounds", "0"], "rounds must be at least 1"),
        (["{run}", "--mem_len", "[-1]"], "each of grid.mem_len must be at least 0"),
        (["{run}", "--split", "third"], "no split 'third'"),
        (["{run}", "{run}"], "Two runs are called"),
        (["{run}", "--out", "{run}/config.yaml"], "cannot be written to"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, language, capsys, words, sentence):
    given = [word.format(run=language) for word in words]
    given += [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert main(["compare", *given]) == 2
    told = capsys.readouterr().err.splitlines()
    assert sentence in told[-1] and sum("error:" in line for line in told) == 1


def test_nothing_is_written_into_the_runs(tmp_path, language):
    before = read_records(language / "metrics.jsonl")
    files = sorted(path.name for path in language.iterdir())
    compared(tmp_path, language, **{"limit": 2, "grid.mem_len": [8]})
    assert read_records(language / "metrics.jsonl") == before
    assert sorted(path.name for path in language.iterdir()) == files


def test_runs_that_held_out_other_examples_are_refused(tmp_path, labels):
    """Of one file, though as many, and under the same name."""
    rows = [f"{word} {number},{label}" for number in range(40) for label, word in enumerate("ab")]
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(["text,label", *rows]))
    runs = []
    for share in (0.1, 0.3):
        runs.append(tmp_path / f"run-{share}")
        shutil.copytree(labels, runs[-1])
        config = yaml.safe_load((runs[-1] / "config.yaml").read_text())
        config["data"] = str(file)
        config["dataset"]["valid_fraction"] = share
        (runs[-1] / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match="but differ in content"):
        compared(tmp_path, *runs, limit=6)


def test_points_that_are_none_are_refused(tmp_path, labels):
    with pytest.raises(UserError, match=r"so that 99 cannot be compared: lower grid\.passes"):
        compared(tmp_path, labels, **{"grid.passes": [99]})
    with pytest.raises(UserError, match="chosen for runs that generate text"):
        compared(tmp_path, labels, mechanisms=["confidence"])
