"""A draft head from a model's own text: written in parts, gone on with, trained, chosen, used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.decoding import training
from deepenough.decoding.api import speculate
from deepenough.decoding.config import DraftHeadConfig, DraftTrainConfig, SelfGeneratedConfig
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.drafters import DraftModelDrafter
from deepenough.decoding.engine import make_engine
from deepenough.decoding.self_generated import (
    SelfGenerated,
    continue_prompts,
    count_new,
    make_prompts,
    write_texts,
)
from deepenough.decoding.training import DraftHeadTask, tune_run
from deepenough.runs import read_records
from deepenough.shortcut.config import PretrainedModelConfig


class Numbers:
    """A tokenizer whose words are numbers."""

    chat_template: str | None = None

    def decode(self, ids: list[int], **_: bool) -> str:
        return " ".join(map(str, ids))

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


class Chatting(Numbers):
    """The same with a chat format: 1 before what a user says, and 2 behind it."""

    chat_template = "a template"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return f"1 {messages[0]['content']} 2"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(3, 40, (120, 6), generator=generator).tolist()
    path = tmp_path / "numbers.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in lines) + "\n")
    return str(path)


def text_config(**changes: int) -> SelfGeneratedConfig:
    own = {"tokens": 300, "prompt_tokens": 6, "new_tokens": 20, "min_chars": 4, "batch": 8}
    return SelfGeneratedConfig(**{**own, **changes})


def test_an_interrupted_writing_goes_on(small, corpus, tmp_path) -> None:
    engine = make_engine(small)

    def write(folder: str, **changes: int) -> list[SelfGenerated]:
        config = text_config(**changes)
        return write_texts(tmp_path / folder, engine, Numbers(), corpus, config, seed=0)

    whole = write("whole")
    assert count_new(whole) >= 300 and len(list((tmp_path / "whole").glob("part-*"))) > 2
    write("parts", tokens=100)
    again = write("parts")
    assert len(again) == len(whole) == len(write("parts"))
    for one, other in zip(again, whole, strict=True):
        assert torch.equal(one.ids_T, other.ids_T) and one.prompt == other.prompt
        assert torch.equal(one.states_TD, other.states_TD)
        assert one.states_TD.shape == (len(one.ids_T) - 1, 32)
        assert one.states_TD.dtype == torch.float16
    with pytest.raises(UserError, match="new_tokens: it was 20 and is now 21"):
        write("parts", new_tokens=21)


def test_greedy_and_drawn_texts(small) -> None:
    engine = make_engine(small)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    greedy = continue_prompts(engine, prompts, 12)
    for text, prompt in zip(greedy, prompts, strict=True):
        ids = torch.tensor([prompt])
        expected = small.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert torch.equal(text.ids_T, expected[0])
    drawn = [
        continue_prompts(engine, prompts, 12, torch.Generator().manual_seed(seed))[0].ids_T.tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(UserError, match="at most 58 new tokens"):
        continue_prompts(engine, prompts, 60)


def test_every_second_prompt_is_in_the_chat_format(corpus) -> None:
    lines = list(make_prompts(Numbers(), corpus, text_config()))
    assert len(lines) >= 100 and len(lines[0]) == 6
    found = list(make_prompts(Chatting(), corpus, text_config()))
    assert found[::2] == lines[::2]
    assert found[1::2] == [[1, *line, 2] for line in lines[1::2]]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--text.tokens", "0"], "text.tokens must be at least 1"),
        (["--data", "nowhere.txt", "--out", "F"], "nowhere.txt"),
    ],
)
def test_wrong_settings_are_refused(words, match, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["decode", "tune", "smollm2", *words]) == 2
    assert match in capsys.readouterr().err


@pytest.fixture
def tuned_run(small, corpus, tmp_path, monkeypatch) -> DraftTrainConfig:
    monkeypatch.setattr(PretrainedModelConfig, "load", lambda self: (small, Numbers()))
    config = DraftTrainConfig(
        out=str(tmp_path / "run"),
        data=corpus,
        text=text_config(tokens=900),
        head=DraftHeadConfig(texts=8, epochs=6, draft_vocab=30, held_out=6),
        until="head",
    )
    config.train = replace(config.train, warmup=2, valid_every=5, save_every=4)
    return config


def test_a_head_is_trained_and_drafts(small, tuned_run) -> None:
    tuned = tune_run(tuned_run)
    records, _ = read_records(Path(tuned_run.out) / "metrics.jsonl")
    valid = [record.values for record in records if record.kind == "valid"]
    assert valid[-1]["loss"] < valid[0]["loss"]
    for values in valid:
        assert 0 <= values["agreement_1"] <= values["accepted"] <= 2 * values["agreement_1"] <= 2
    assert tuned.meta["after"]["accepted"] == valid[-1]["accepted"]
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": 20}
    fast = speculate(small, draft_model=tuned_run.out, drafter=["draft_model"])
    found = fast.generate(**given, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, small.generate(**given, **options))
    assert found.drafted > 0


def test_an_interrupted_training_goes_on(small, tuned_run, tmp_path, monkeypatch) -> None:
    whole = tune_run(tuned_run)
    monkeypatch.setattr(DraftHeadTask, "begin_step", _stop_at(9))
    other = replace(tuned_run, out=str(tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        tune_run(other)
    monkeypatch.setattr(DraftHeadTask, "begin_step", lambda self, step: None)
    again = tune_run(replace(other, resume=True))
    for name, value in whole.head.state_dict().items():
        torch.testing.assert_close(again.head.state_dict()[name], value, rtol=0, atol=0)


def _stop_at(wanted: int) -> Callable[[Any, int], None]:
    def stop(_: Any, step: int) -> None:
        if step == wanted:
            raise KeyboardInterrupt

    return stop


def test_the_fastest_drafts_are_chosen_and_kept(small, tuned_run, monkeypatch) -> None:
    monkeypatch.setattr(training, "_TIMED_PROMPTS", 2)
    settings = replace(tuned_run, until="choice")
    tuned = tune_run(settings)
    choice = DraftModel.from_pretrained(settings.out).choice
    assert choice == tuned.choice and choice["machine"]["threads"] >= 1
    rates = [row["tokens_per_second"] for row in choice["measured"]]
    assert rates == sorted(rates, reverse=True) and choice["tokens_per_second"] == rates[0]
    assert {tuple(row["names"]) for row in choice["measured"]} == {
        (),
        ("lookup",),
        ("lookup", "linear"),
        ("lookup", "draft_model"),
    }
    assert {row["vocab_size"] for row in choice["measured"]} == {8, 30}
    tuned.choice |= {"names": ["draft_model"], "num_draft_tokens": 3, "vocab_size": 20}
    chosen = speculate(small, draft_model=tuned).drafter
    assert isinstance(chosen, DraftModelDrafter) and chosen.num_draft_tokens == 3
    assert speculate(small, draft_model=tuned, num_draft_tokens=1).drafter.num_draft_tokens == 1
    tuned.choice["names"] = []
    assert speculate(small, draft_model=tuned).drafter is None


def test_an_earlier_run_is_overwritten_only_if_asked(tuned_run) -> None:
    first = tune_run(tuned_run)
    with pytest.raises(UserError, match="exists already"):
        tune_run(tuned_run)
    refused = replace(tuned_run, overwrite=True, head=replace(tuned_run.head, held_out=500))
    with pytest.raises(UserError, match=r"lower head\.held_out"):
        tune_run(refused)
    refused = replace(tuned_run, overwrite=True, head=replace(tuned_run.head, start="nowhere"))
    with pytest.raises(UserError, match="nowhere holds no draft model"):
        tune_run(refused)
    assert DraftModel.from_pretrained(tuned_run.out).meta["after"] == first.meta["after"]
    again = tune_run(replace(tuned_run, overwrite=True))
    assert again.meta["after"] == first.meta["after"]


def test_training_goes_on_from_an_earlier_head(tuned_run, tmp_path) -> None:
    tune_run(tuned_run)
    other = replace(tuned_run, out=str(tmp_path / "other"))
    other.head = replace(tuned_run.head, start=tuned_run.out, epochs=1)
    first = read_records(Path(tuned_run.out) / "metrics.jsonl")[0]
    tune_run(other)
    then = read_records(Path(other.out) / "metrics.jsonl")[0]
    losses = [[r.values["loss"] for r in each if r.kind == "valid"] for each in (first, then)]
    assert losses[1][0] == pytest.approx(losses[0][-1], rel=1e-4)


def test_too_few_texts_are_refused(tuned_run) -> None:
    tuned_run.head.held_out = 500
    with pytest.raises(UserError, match=r"lower head\.held_out"):
        tune_run(tuned_run)
    assert not Path(tuned_run.out).exists()
