"""Language modelling with a Lazy Transformer: trained, measured, with other steps than trained."""

import math
from pathlib import Path

import pytest

from deepenough.cli.lazy import eval as eval_command
from deepenough.cli.lazy import train as train_command
from deepenough.errors import UserError
from deepenough.lazy.evaluation import load_translator
from deepenough.runs import read_records


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_file, shared_cache) -> Path:
    folder = tmp_path_factory.mktemp("language") / "run"
    values = {
        "task": "language",
        "run.folder": folder,
        "data": text_file,
        "dataset.cache": shared_cache,
        "dataset.vocab_size": 400,
        "dataset.batch_size": 4,
        "dataset.length": 8,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.d_ff": 32,
        "model.decoder_steps": 2,
        "model.label_smoothing": 0.1,
        "train.steps": 8,
        "train.warmup": 2,
        "train.lr": 0.01,
        "train.log_every": 1,
        "train.valid_every": 8,
        "train.save_every": 4,
    }
    assert train_command.main([f"--{name}={value}" for name, value in values.items()]) == 0
    return folder


def test_a_training_is_measured_in_perplexity(run):
    records, _ = read_records(run / "metrics.jsonl")
    losses = [record.values["loss"] for record in records if record.kind == "train"]
    assert losses[-1] < losses[0]
    test = next(record.values for record in records if record.kind == "test")
    assert test["perplexity"] == pytest.approx(math.exp(test["loss"]))


def test_eval_repeats_the_test_and_takes_other_steps(run, capsys):
    assert eval_command.main([str(run)]) == 0
    assert "perplexity" in capsys.readouterr().out
    records, _ = read_records(run / "metrics.jsonl")
    test = next(record.values for record in records if record.kind == "test")
    again = records[-1].values
    assert records[-1].kind == "language"
    assert again["loss"] == pytest.approx(test["loss"], abs=1e-6)
    assert eval_command.main([str(run), "--decoder_steps", "4", "--split", "valid"]) == 0
    deeper = read_records(run / "metrics.jsonl")[0][-1].values
    assert deeper["flops_per_token"] > again["flops_per_token"]
    assert eval_command.main([str(run), "--decoder_epsilon", "1.0"]) == 0
    sooner = read_records(run / "metrics.jsonl")[0][-1].values
    assert sooner["flops_per_token"] < again["flops_per_token"]


def test_a_split_or_steps_that_cannot_be_are_refused(run):
    with pytest.raises(UserError, match="has no split 'dev'"):
        eval_command.main([str(run), "--split", "dev"])
    with pytest.raises(UserError, match="steps must be at least 1: got 0"):
        eval_command.main([str(run), "--decoder_steps", "0"])
    with pytest.raises(UserError, match="patience must be at least 1: got 0"):
        eval_command.main([str(run), "--decoder_epsilon", "0.5", "--patience", "0"])


def test_a_language_model_does_not_translate(run):
    with pytest.raises(UserError, match="is a language model, which has no source"):
        load_translator(str(run))
