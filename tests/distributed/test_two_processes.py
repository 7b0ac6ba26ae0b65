"""Two real processes give what one gives: the same losses, validation and choices to 1e-5.

Language models and translators without dropout, whose masks differ by process; classifiers with it:
each process takes its rows' share of one draw, as it takes its streams' share of the Gumbel noise.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from deepenough.__main__ import main
from deepenough.training.trainer import Trainer

Tiny = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.distributed

SETTINGS = {
    "model.dropout": 0.0,
    "model.cutoffs": [60, 200],
    "model.div_value": 2.0,
    "search.optimise": "alternating",
    "model.pattern": "a**",
    "search.alpha_lr": 60.0,
    "search.cost": "flops",
    "search.cost_weight": 0.3,
    "train.accumulate": 2,
}

COMPARED = (
    *("loss", "bits_per_byte", "bleu", "tau", "entropy", "expected_cost", "grad_norm"),
    *("task", "kl", "accuracy", "passes", "agreement"),
)


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # By the loopback device alone, so that neither a network nor a name server is needed.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def flags(settings: dict[str, Any], command: Sequence[str] = ("par", "search")) -> list[str]:
    return [*command, *(f"--{name}={value}" for name, value in settings.items())]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_close(one: Path, two: Path) -> None:
    first, second = records(one), records(two)
    assert [(r["kind"], r["step"]) for r in first] == [(r["kind"], r["step"]) for r in second]
    num_compared = 0
    for before, after in zip(first, second, strict=True):
        for name in COMPARED:
            if name in before:
                assert after[name] == pytest.approx(before[name], abs=1e-5, rel=1e-5), name
                num_compared += 1
        for row, other in zip(before.get("pi", []), after.get("pi", []), strict=True):
            assert other == pytest.approx(row, abs=1e-5)
        if before["kind"] in ("valid", "test") and "tokens" in before:
            assert after["tokens"] == before["tokens"]
        if before["kind"] == "derive":
            assert after["pattern"] == before["pattern"]
    assert num_compared >= 30


def test_the_same_command_trains_in_two_processes(tmp_path: Path, tiny: Tiny) -> None:
    """A search, and then the training of the fixed pattern it found."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = tiny(one, SETTINGS | {"search.retrain": "scratch"})
    assert main(flags(settings)) == 0
    torchrun("-m", "deepenough", *flags(settings | {"out": str(two)}))
    assert_close(one, two)
    assert_close(one / "derived", two / "derived")


def test_pairs_of_different_lengths_are_shared_by_two_processes(
    tmp_path: Path, shared_cache: Path
) -> None:
    """Processes that have more tokens count for more; each translates its share."""
    for split, num in (("train", 60), ("valid", 15), ("test", 15)):
        lines = [("la " * (4 + row % 5)).strip() for row in range(num)]
        for language in ("en", "de"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {
        "out": str(one),
        "data": str(tmp_path),
        "dataset.cache": str(shared_cache),
        "dataset.vocab_size": 265,
        "dataset.max_length": 40,
        "dataset.batch_tokens": 150,  # an odd number of pairs in some batches
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.d_ff": 32,
        "model.decoder_steps": 2,
        "model.dropout": 0.0,
        "model.ff_dropout": 0.0,
        "search.beams": 2,
        "epochs": "null",
        "train.steps": 30,
        "train.warmup": 3,
        "train.lr": 0.01,
        "train.log_every": 1,
        "train.valid_every": 15,
    }
    command = ("lazy", "train")
    assert main(flags(settings, command)) == 0
    torchrun("-m", "deepenough", *flags(settings | {"out": str(two)}, command))
    assert_close(one, two)
    assert records(one)[-1]["bleu"] > 10.0, "translations are compared by their BLEU"


def assert_same_weights(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    first, second = load_file(one), load_file(two)
    assert first.keys() == second.keys() and first
    for name, weight in first.items():
        if not name.endswith("key.bias"):  # which no attention depends on: its gradient is rounding
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(second[name], weight, **close, msg=name)


def test_a_classifier_drops_in_two_processes_what_it_drops_in_one(
    tmp_path: Path, reviews: Path, tiny_bert: Path
) -> None:
    """In embeddings, attention and heads; batches have texts of several lengths."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {"out": one, "data": reviews, "model.encoder": tiny_bert, "epochs": "null"}
    settings |= {"model.dropout": 0.2, "dataset.batch_size": 8, "train.steps": 16}
    settings |= {"train.warmup": 2, "train.log_every": 1, "train.valid_every": 4}
    settings |= {"train.accumulate": 2, "train.lr": 1e-3}
    assert main(flags(settings, ("ponder", "train"))) == 0
    torchrun("-m", "deepenough", *flags(settings | {"out": two}, ("ponder", "train")))
    assert_close(one, two)
    assert_same_weights(one / "model/model.safetensors", two / "model/model.safetensors")


def test_maps_are_tuned_in_two_processes_as_in_one(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(40)]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(
        tmp_path / "gpt2"
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**sizes, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    draw = random.Random(0)
    lines = [" ".join(draw.choices(words, k=draw.randrange(8, 30))) for _ in range(120)]
    (tmp_path / "words.txt").write_text("\n".join(lines))
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {"out": one, "model.name": tmp_path / "gpt2", "data": tmp_path / "words.txt"}
    settings |= {"dataset.min_chars": 10, "tuned": "true", "tune.batch": 50, "tune.held_out": 64}
    settings |= {"tune.top_tokens": 20, "tune.sampled_tokens": 5, "train.steps": 30}
    settings |= {"train.log_every": 1, "train.valid_every": 10}
    assert main(flags(settings, ("shortcut", "fit"))) == 0
    torchrun("-m", "deepenough", *flags(settings | {"out": two}, ("shortcut", "fit")))
    assert_close(one / "tuning", two / "tuning")
    name = "shortcuts/shortcuts.safetensors"
    assert_same_weights(one / name, two / name, 1e-4)


def test_runs_move_between_one_process_and_two(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    settings = tiny(whole, SETTINGS)
    assert main(flags(settings)) == 0
    step = Trainer._step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == 6:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        assert main(flags(settings | {"out": str(tmp_path / "from-one")})) == 130

    torchrun(str(Path(__file__).with_name("worker.py")), json.dumps(settings), str(tmp_path))

    assert_close(whole, tmp_path / "from-one")
    assert records(tmp_path / "from-two")[-1]["step"] == 6
    from_two = settings | {"out": str(tmp_path / "from-two"), "resume": True}
    assert main(flags(from_two)) == 0
    assert_close(whole, tmp_path / "from-two")

    answers = [json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in range(2)]
    for answer in answers:
        assert answer["processes"] == 2
        assert len(answer["same"]) >= 6 and all(answer["same"])
        no, in_use, odd = answer["said"]  # every process hears it, so that none waits for ever
        assert no == "The first process says no."
        assert "exists already" in in_use
        assert "3 streams cannot be shared by 2 processes" in odd
