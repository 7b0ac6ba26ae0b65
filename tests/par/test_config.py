"""Patterns and settings: letters, ranges, and the sentences for wrong ones."""

import subprocess
import sys

import pytest

from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.config import options, validate
from deepenough.errors import UserError
from deepenough.par.config import ParSearchConfig, SearchConfig, check_pattern, interleaved


@pytest.mark.parametrize("pattern", ["a", "d", "aadad-", "-d", "ad" * 20])
def test_good_patterns_pass(pattern):
    assert check_pattern(pattern) == pattern


def test_open_blocks_pass_where_they_may_stand():
    assert check_pattern("a*-", allow_open=True) == "a*-"
    assert check_pattern("**", allow_open=True) == "**"
    with pytest.raises(UserError, match=r"'a\*-' has the unknown letter '\*'"):
        check_pattern("a*-")


@pytest.mark.parametrize("allow_open", [False, True])
def test_unknown_letters(allow_open):
    with pytest.raises(UserError, match="'axd' has the unknown letter 'x': use a for attention"):
        check_pattern("axd", allow_open)
    with pytest.raises(UserError, match="unknown letter 'A'"):
        check_pattern("Ad", allow_open)


@pytest.mark.parametrize("pattern", ["", "-", "---"])
def test_no_block(pattern):
    with pytest.raises(UserError, match="has no block: give at least one a"):
        check_pattern(pattern)
    with pytest.raises(UserError, match="has no block"):
        check_pattern(pattern, allow_open=True)


def test_interleaved():
    assert [interleaved(n) for n in (1, 2, 5)] == ["a", "ad", "adada"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau_start": 0.0}, "tau_start must be above 0"),
        ({"budget": 0.0}, "budget must be above 0"),
        ({"budget_weight": -1.0}, "budget_weight must be at least 0"),
        ({"budget_weight": 1.0}, "budget_weight needs a search.budget"),
        ({"cost_length": 0}, "cost_length must be at least 1"),
        ({"held_out": 1.0}, "held_out must be above 0 and below 1"),
        ({"choose_after": 1.0}, "choose_after must be at least 0 and below 1"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        validate(SearchConfig(**changes))


def test_settings_are_read_without_torch():
    """Figures read patterns, and `--help` settings: neither must wait for torch."""
    modules = "deepenough.par.config, deepenough.par.commands"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


#: Every flag of the first public code's scripts train.py, build_data.py and optimal_cuts.py that
#: has another name here, and that name.
FLAGS = {
    "num_layers": "model.num_blocks",
    "dropout_rate": "model.dropout",
    "d_ffn": "model.d_ff",
    "proj_factor": "model.div_value",
    "proj_dims": "model.div_value",
    "max_lr": "train.lr",
    "warmup_steps": "train.warmup",
    "opt_name": "train.optimizer",
    "clipvalue": "train.clip_value",
    "tau_is_trainable": "search.tau",
    "model_name": "out",
    "train_directory": "data",
    "valid_directory": "data",
    "test_directory": "data",
    "text_file": "data",
    "sp_model_prefix": "dataset.tokenizer",
    "train_tokenizer": "dataset.tokenizer",
    "seq_len": "dataset.length",
}
SAME_FLAGS = ("d_model", "num_heads", "mem_len", "straight_through", "tau_start", "tau_end")
SAME_FLAGS += ("epochs", "cutoffs", "vocab_size", "lowercase", "batch_size")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_the_source_is_answered_by_its_name_here(flag, tmp_path, capsys):
    assert main(["par", "search", f"--{flag}=1"]) == 2
    sentence = f"There is no option --{flag}; did you mean --{FLAGS[flag]}?"
    assert sentence in capsys.readouterr().err
    (tmp_path / "settings.yaml").write_text(f"{flag}: 1\n")
    assert main(["par", "search", "--config", str(tmp_path / "settings.yaml")]) == 2
    assert f"did you mean {FLAGS[flag]}?" in capsys.readouterr().err


def test_the_other_flags_of_the_source_are_options_of_ours():
    known = [option.name.rpartition(".")[2] for option in options(ParSearchConfig)]
    assert [flag for flag in SAME_FLAGS if known.count(flag) != 1] == []


def test_steps_and_epochs_are_rivals(tmp_path, capsys):
    assert main(["par", "train", "--steps", "3", "--epochs", "2"]) == 2
    assert "Give either --epochs or --train.steps, not both." in capsys.readouterr().err
    file = tmp_path / "settings.yaml"
    file.write_text("epochs: 3\n")
    table = commands()
    for words, epochs, steps in (
        (["--config", str(file)], 3, 2000),
        (["--config", str(file), "--steps", "7"], None, 7),
        (["--epochs", "null", "--steps", "7"], None, 7),
    ):
        config = parse_command(table["par train"], "par train", words)
        assert (config.epochs, config.train.steps) == (epochs, steps)
    # Where epochs are the default, steps that are asked for are made.
    for name in ("ponder train", "lazy train"):
        assert parse_command(table[name], name, []).epochs
        config = parse_command(table[name], name, ["--train.steps", "3"])
        assert (config.epochs, config.train.steps) == (None, 3)
