"""A finished model is measured and continued as it was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from deepenough import ParForCausalLM
from deepenough.config import ContinueConfig, resolve
from deepenough.errors import UserError
from deepenough.par.config import ParEvalConfig
from deepenough.par.evaluation import continue_text, evaluate, load_model

Tiny = Callable[..., dict[str, Any]]


def measurer(run: Path, tiny: Tiny) -> Callable[..., dict[str, float]]:
    """Return what measures a model on the valid split of the text it was trained on."""
    wanted = ("data", "dataset.cache", "dataset.batch_size")
    common = {name: value for name, value in tiny(run).items() if name in wanted}

    def measure(**changes: Any) -> dict[str, float]:
        given = {name.replace("__", "."): value for name, value in changes.items()}
        settings = common | {"run": str(run), "split": "valid"} | given
        return evaluate(resolve(ParEvalConfig, None, settings))

    return measure


def test_memory_can_be_longer_when_a_model_is_measured(trained: Path, tiny: Tiny) -> None:
    measure = measurer(trained, tiny)
    own = measure()
    same = load_model(str(trained)).config.mem_len
    assert measure(mem_len=same)["loss"] == own["loss"]
    longer = measure(mem_len=4 * same)
    assert longer["tokens"] == own["tokens"] and longer["loss"] != own["loss"]
    with pytest.raises(UserError, match="mem_len must be at least 0: got -1"):
        measure(mem_len=-1)


def test_a_longer_memory_is_seen(trained: Path, tiny: Tiny) -> None:
    """As by a model that was made with that memory."""
    measure = measurer(trained, tiny)
    model = load_model(str(trained))
    own = model.config.mem_len
    found = measure(mem_len=4 * own)["loss"]
    assert found != measure()["loss"]
    config = json.loads((trained / "model" / "config.json").read_text())
    (trained / "model" / "config.json").write_text(json.dumps(config | {"mem_len": 4 * own}))
    with pytest.raises(UserError, match=r"changed on purpose, delete checksums\.json"):
        measure()
    (trained / "model" / "checksums.json").unlink()
    assert measure()["loss"] == pytest.approx(found)


def test_a_model_is_measured_as_it_was_trained(trained: Path, tiny: Tiny) -> None:
    measure = measurer(trained, tiny)
    as_trained = measure()["loss"]
    assert measure(dataset__length=8)["loss"] == as_trained
    assert measurer(trained / "model", tiny)()["loss"] == as_trained


def test_models_of_another_kind_are_refused(tmp_path: Path, trained: Path) -> None:
    sizes = {"vocab_size": 400, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(trained / "model").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="is a GPT2LMHeadModel, not one of deepenough par"):
        load_model(str(tmp_path / "gpt2"))


def test_the_split_is_the_one_that_training_held_out(trained: Path, tiny: Tiny) -> None:
    """Else a model would be measured on what it was trained on."""
    measure = measurer(trained, tiny)
    before = measure()["tokens"]
    config = (trained / "config.yaml").read_text()
    changed = config.replace("valid_fraction: 0.05", "valid_fraction: 0.2")
    (trained / "config.yaml").write_text(changed)
    with pytest.raises(UserError, match="if you changed it on purpose, delete its first line"):
        measure()
    (trained / "config.yaml").write_text(changed.partition("\n")[2])
    assert measure()["tokens"] > 2 * before


def test_lines_are_written_as_lines(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    end = tokenizer.eos_token_id
    asked = []

    def generate(self: Any, ids: torch.Tensor, **_: Any) -> torch.Tensor:
        asked.append(ids[0].tolist())
        return torch.cat([ids, torch.tensor([[end, *tokenizer.encode("the")]])], 1)

    monkeypatch.setattr(ParForCausalLM, "generate", generate)
    text = continue_text(ContinueConfig(str(trained), "a line\nthe next", tokens=5, temperature=0))
    assert asked[0].count(end) == 1
    assert text.split("\n")[0] == "a line" and text.count("\n") == 2
    with pytest.raises(UserError, match="top_k must be at least 0"):
        continue_text(ContinueConfig(str(trained), "a", top_k=-1))
    with pytest.raises(UserError, match="The prompt is empty"):
        continue_text(ContinueConfig(str(trained), " "))


def test_prompts_of_several_lengths_are_padded_before_them(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    both = tokenizer(["the", "the function returns a"], padding=True, return_tensors="pt")
    alone = tokenizer(["the"], return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": 6}
    found = model.generate(**both, **options)[0, -6:]
    assert torch.equal(found, model.generate(**alone, **options)[0, -6:])
