"""A draft head from a model's own text: written in parts, gone on with, trained, chosen, used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.decoding import training
from deepenough.decoding.api import speculate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.config import DraftHeadConfig, DraftTrainConfig, SelfGeneratedConfig
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Head
from deepenough.decoding.self_generated import (
    SelfGenerated,
    continue_prompts,
    count_new,
    make_prompts,
    write_texts,
)
from deepenough.decoding.training import DraftHeadTask, tune_run
from deepenough.hf.adapter import adapt
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
        return write_texts(tmp_path / folder, engine, Numbers(), corpus, config, 0, (0, 1, 2))

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
        assert one.inputs_TZ.dtype == torch.bfloat16 and one.sampled == other.sampled
        assert torch.equal(one.inputs_TZ, other.inputs_TZ)
    assert {text.sampled for text in whole} == {True, False}
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
    )
    config.train = replace(config.train, warmup=2, valid_every=5, save_every=4)
    return config


def test_a_head_is_trained_and_drafts(small, tuned_run) -> None:
    tuned = tune_run(tuned_run)
    records, _ = read_records(Path(tuned_run.out) / "metrics.jsonl")
    valid = [record.values for record in records if record.kind == "valid"]
    assert valid[-1]["loss"] < valid[0]["loss"]
    for values in valid:
        by_place = [values[f"accepted_{place}"] for place in (1, 2, 3)]
        assert 1 >= by_place[0] >= by_place[1] >= by_place[2] >= 0
        assert values["accepted"] == pytest.approx(sum(by_place))
    assert tuned.meta["after"]["accepted"] == valid[-1]["accepted"]
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": 20}
    fast = speculate(small, draft_model=tuned_run.out, drafter=["draft_model"])
    found = fast.generate(**given, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, small.generate(**given, **options))
    assert found.drafted > 0


def test_the_start_is_the_linear_map_that_fits_best(small, corpus, tmp_path) -> None:
    config = text_config(tokens=1500)
    folder = tmp_path / "text"
    texts = write_texts(folder, make_engine(small), Numbers(), corpus, config, 0, (0, 1, 2))
    adapter = adapt(small)
    head = Eagle3Head(Eagle3Config.of(adapter, 40))
    training.start_head(head, adapter, texts)
    rows, targets = [], []
    for text in texts:
        embeddings, inputs, _ = training.head_inputs(adapter, text)
        own = torch.cat([inputs / head.input_scale, rms_norm(embeddings, (32,))], dim=1)
        rows.append(own[text.prompt - 1 :].double())
        targets.append(text.states_TD[text.prompt :].double())
    x, scale = torch.cat(rows), torch.cat(targets).std(dim=0)
    y = torch.cat(targets) / scale
    gram = x.T @ x
    ridge = 1e-2 * torch.diag(gram.diagonal())
    expected = torch.linalg.solve(gram + ridge, x.T @ y).T
    found = head.fc.weight.double()
    torch.testing.assert_close(found, expected[:, :96], rtol=1e-3, atol=1e-3)
    # What attention carries from a token to itself is the rest of the map, of its best rank.
    layer = head.midlayer.self_attn
    own = layer.o_proj.weight.view(32, 2, 2, 8)[:, :, 0].flatten(1) @ layer.v_proj.weight[:, :32]
    left, sizes, right = torch.linalg.svd(expected[:, 96:])
    best = left[:, :16] * sizes[:16] @ right[:16]
    torch.testing.assert_close(own.double(), best, rtol=1e-3, atol=1e-3)
    assert torch.equal(head.lm_head.weight, small.lm_head.weight)


def test_the_simulation_counts_what_decoding_counts(small, tuned_run) -> None:
    """Rounds and accepted drafts by position, without running the model with drafts."""
    tuned = tune_run(tuned_run)
    engine = make_engine(small)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [3, 30, 20, 10]]
    new_tokens, accepted, passes = 24, 0, 0
    fast = speculate(small, ["draft_model"], draft_model=tuned, num_draft_tokens=3)
    fast.generation_config.eos_token_id = None
    for prompt in prompts:
        given = {"do_sample": False, "max_new_tokens": new_tokens, "return_dict_in_generate": True}
        output = fast.generate(torch.tensor([prompt]), **given)
        accepted, passes = accepted + output.accepted, passes + output.passes
    small.generation_config.eos_token_id = None
    texts = continue_prompts(engine, prompts, new_tokens + 3, layers=tuned.head.config.layers)
    rounds, *by_place = training.predict_acceptance(tuned.head, engine.adapter, texts)
    assert rounds == passes
    # Of the last pass, decoding counts what it has written, the simulation what was right.
    assert 0 <= sum(by_place) - accepted <= 2 * len(prompts)


def test_training_ends_when_nothing_is_gained(small, tuned_run, monkeypatch) -> None:
    accepted = iter([0.2, 0.3, 0.3, 0.29, *[0.9] * 9])

    def evaluate(*_: Any) -> dict[str, float]:
        return {"loss": 1.0, "accepted": next(accepted)}

    monkeypatch.setattr(DraftHeadTask, "evaluate", evaluate)
    tuned_run.head.patience = 2
    tuned = tune_run(tuned_run)
    assert tuned.meta["after"] == {"accepted": 0.29}
    again = tune_run(replace(tuned_run, resume=True))
    assert again.meta["after"] == {"accepted": 0.29}


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


def test_a_draft_model_drafts_by_itself(small, tuned_run) -> None:
    tuned = tune_run(tuned_run)
    found = speculate(small, draft_model=tuned).drafter.drafters
    assert [type(each).__name__ for each in found] == ["LookupDrafter", "Eagle3Drafter"]
    fast = speculate(small, "draft_model", draft_model=tuned, num_draft_tokens=3)
    assert isinstance(fast.drafter, Eagle3Drafter) and fast.drafter.num_draft_tokens == 3


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
