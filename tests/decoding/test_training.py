"""A draft head from a model's own text: written in parts, gone on with, trained, chosen, used."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepenough import Shortcuts, UserError
from deepenough.__main__ import main
from deepenough.decoding import autotune, training
from deepenough.decoding.api import speculate
from deepenough.decoding.autotune import successive_halving
from deepenough.decoding.config import DraftHeadConfig, DraftTrainConfig, SelfGeneratedConfig
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.drafters import DraftConfig, DraftModelDrafter, ShortcutDrafter
from deepenough.decoding.engine import make_engine
from deepenough.decoding.self_generated import (
    SavedTexts,
    continue_prompts,
    instructions,
    make_prompts,
    write_texts,
)
from deepenough.decoding.training import DraftHeadTask, tune_run
from deepenough.runs import read_records
from deepenough.shortcut.config import PretrainedModelConfig


class Numbers:
    """A tokenizer whose words are numbers; others are told apart by their length."""

    chat_template = None
    bos_token_id = eos_token_id = None

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids.tolist()))

    def __call__(self, text: str | list[str], **_: bool) -> dict[str, list[Any]]:
        if isinstance(text, list):
            ids = [self(line)["input_ids"] for line in text]
            return {"input_ids": ids, "special_tokens_mask": [[0] * len(line) for line in ids]}
        return {"input_ids": [int(w) if w.isdigit() else 3 + len(w) for w in text.split()]}


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
    def write(folder: str, **changes: int) -> SavedTexts:
        config = text_config(**changes)
        return write_texts(tmp_path / folder, small, Numbers(), corpus, config, seed=0)

    whole = write("whole")
    assert whole.num_new >= 300 and whole.num_parts > 2
    write("parts", tokens=100)
    again = write("parts")
    assert len(again) == len(whole) == len(SavedTexts(tmp_path / "parts"))
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


def test_prompts_are_lines_and_instructions_in_turn(corpus) -> None:
    config = text_config()
    found = list(make_prompts(Numbers(), corpus, config))
    assert len(found) >= 200 and len(found[0]) == 6
    assert found[1] == Numbers()(next(instructions()))["input_ids"]
    config.instructions = False
    assert list(make_prompts(Numbers(), corpus, config)) == found[::2]


def test_instructions_are_not_repeated() -> None:
    found = list(instructions())
    assert len(set(found)) == len(found) > 10_000
    assert not [text for text in found if "{" in text or "  " in text or " ," in text]


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


@pytest.fixture
def few_trials(monkeypatch) -> None:
    monkeypatch.setattr(training, "_KEPT_PROMPTS", 2)
    monkeypatch.setattr(autotune, "_NUM_DRAFT_TOKENS", (1,))


def test_the_fastest_drafts_are_chosen_and_kept(small, tuned_run, few_trials) -> None:
    settings = replace(tuned_run, until="choice")
    tuned = tune_run(settings)
    choice = DraftModel.from_pretrained(settings.out).choice
    assert choice == tuned.choice and choice["machine"]["threads"] >= 1
    assert {tuple(row["names"]) for row in choice["measured"]} >= {
        (),
        ("draft_model",),
        ("linear",),
    }
    tuned.choice |= {"names": ["draft_model"], "num_draft_tokens": 3, "vocab_size": 20}
    chosen = speculate(small, draft_model=tuned).drafter
    assert isinstance(chosen, DraftModelDrafter) and chosen.num_draft_tokens == 3
    fast = speculate(small, draft_model=tuned, drafter="auto", num_draft_tokens=1)
    assert fast.drafter is None or fast.drafter.num_draft_tokens == 1


def test_an_earlier_run_is_overwritten_only_if_asked(tuned_run) -> None:
    first = tune_run(tuned_run)
    with pytest.raises(UserError, match="exists already"):
        tune_run(tuned_run)
    again = tune_run(replace(tuned_run, overwrite=True))
    assert again.meta["after"] == first.meta["after"]


def test_successive_halving_gives_the_faster_half_more_prompts() -> None:
    """Candidates whose speeds are known: the fastest three are timed on all eight prompts."""
    configs = [DraftConfig((), number) for number in range(1, 9)]
    asked: list[int] = []

    def measure(config: DraftConfig, prompt: Any) -> tuple[float, int]:
        asked.append(config.num_draft_tokens)
        return 1.0 / config.num_draft_tokens, 1

    trials = successive_halving(configs, [[1]] * 8, measure)
    assert [trial.config.num_draft_tokens for trial in trials] == [8, 7, 6, 5, 4, 3, 2, 1]
    # 1 prompt for all, 2 more for the best four, 4 more and the last one for the best two.
    assert [asked.count(number) for number in range(1, 9)] == [1, 1, 1, 1, 3, 3, 8, 8]


def test_training_goes_on_from_an_earlier_head(tuned_run, tmp_path) -> None:
    tune_run(tuned_run)
    other = replace(tuned_run, out=str(tmp_path / "other"))
    other.head = replace(tuned_run.head, start=tuned_run.out, epochs=1)
    first = read_records(Path(tuned_run.out) / "metrics.jsonl")[0]
    tune_run(other)
    then = read_records(Path(other.out) / "metrics.jsonl")[0]
    losses = [[r.values["loss"] for r in each if r.kind == "valid"] for each in (first, then)]
    assert losses[1][0] == pytest.approx(losses[0][-1], rel=1e-4)


def test_shortcuts_are_tuned_and_take_part(
    small, tuned_run, corpus, tmp_path, few_trials, monkeypatch
) -> None:
    short = functools.partial(training.tune, steps=20, batch=32, held_out=32)
    monkeypatch.setattr(training, "tune", short)
    lines = Path(corpus).read_text().splitlines()
    Shortcuts.fit(small, Numbers(), lines, ridge=1e-3).save_pretrained(tmp_path / "maps")
    settings = replace(tuned_run, until="choice", shortcuts=str(tmp_path / "maps"))
    tuned = tune_run(settings)
    saved = Shortcuts.from_pretrained(Path(settings.out) / "model" / "shortcuts")
    assert 1 in saved.tuned
    tried = {(tuple(row["names"]), row["layer"]) for row in tuned.choice["measured"]}
    assert (("shortcut",), 1) in tried and (("lookup", "shortcut"), 1) in tried
    # Chosen drafts find their maps in the folder.
    again = DraftModel.from_pretrained(settings.out)
    again.choice |= {"names": ["shortcut"], "layer": 1}
    chosen = speculate(small, draft_model=again).drafter
    assert isinstance(chosen, ShortcutDrafter) and chosen.layer == 1


def test_too_few_texts_are_refused(tuned_run) -> None:
    tuned_run.head.held_out = 500
    with pytest.raises(UserError, match=r"lower head\.held_out"):
        tune_run(tuned_run)
