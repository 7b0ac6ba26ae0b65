"""Early layers adapted for drafts: copies learn, the model stays, training goes on where it was."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deepenough import UserError
from deepenough.__main__ import main
from deepenough.decoding.accelerate import accelerate
from deepenough.decoding.making import make_engine
from deepenough.decoding.own_text import Written, continue_prompts
from deepenough.decoding.tune import ExitTune, default_training, tune_run
from deepenough.decoding.tune_lora import EarlyLayers, LoraSettings, fit_start
from deepenough.decoding.tune_lora_task import LoraTask
from deepenough.decoding.tune_task import HeadSettings, read_texts
from deepenough.decoding.tune_text import OwnTextSettings
from deepenough.decoding.tuned import Tuned
from deepenough.hf.adapter import adapt
from deepenough.runs import read_records
from deepenough.shortcut.study import ModelChoice
from deepenough.training.config import RunSettings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)

WORDS = 30
GREEDY = {"do_sample": False, "max_new_tokens": 16}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_model(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}
        config = GPT2Config(vocab_size=WORDS, **sizes, initializer_range=0.3, **TOKENS)
        return GPT2LMHeadModel(config).eval().requires_grad_(False)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=WORDS,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        **shape,
        **TOKENS,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    rows = torch.randint(3, WORDS, (400, 8), generator=torch.Generator().manual_seed(0))
    file.write_text("\n".join(" ".join(f"w{number}" for number in row) for row in rows.tolist()))
    return str(file)


def settings_of(corpus: str, folder: Path, tokens: int = 600) -> ExitTune:
    return ExitTune(
        run=RunSettings(str(folder), resume=True),
        text=OwnTextSettings(
            data=corpus,
            instructions=False,
            tokens=tokens,
            prompt_tokens=6,
            new_tokens=16,
            min_chars=4,
            batch=64,
        ),
        head=HeadSettings(texts=32, epochs=0.2, shortlist=25, hard=0.0, held_out=24),
        lora=LoraSettings(layers=2, rank=8, dropout=0.0, epochs=10),
        train=replace(default_training(), lr=1e-2, warmup=2, log_every=5, save_every=5),
        until="lora",
    )


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    made = make_model(request.param)
    made.generation_config.eos_token_id = None  # so that all texts are long
    monkeypatch.setattr(ModelChoice, "load", lambda self: (made, make_tokenizer()))
    return made


@pytest.fixture(scope="module")
def texts() -> list[Written]:
    prompts = torch.randint(3, WORDS, (24, 5), generator=torch.Generator().manual_seed(0)).tolist()
    return continue_prompts(make_engine(make_model()), prompts, 12)


def test_layers_learn_and_draft_and_the_model_stays(model, corpus, tmp_path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = tmp_path / "run"
    tuned = tune_run(settings_of(corpus, folder, tokens=3500))
    records, _ = read_records(folder / "checkpoints" / "lora" / "metrics.jsonl")
    valid = [record.values for record in records if record.kind == "valid"]
    assert valid[-1]["loss"] < 0.97 * valid[0]["loss"]
    own = tuned.adapted.meta
    assert own["after"]["agreement_1"] > own["before"]["agreement_1"] > 0
    assert own["after"]["accepted"] == valid[-1]["accepted"]
    losses = [record.values["loss"] for record in records if record.kind == "train"]
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    ids = torch.randint(3, WORDS, (3, 6), generator=torch.Generator().manual_seed(2))
    for rows, drafts in ((1, ["adapted"]), (3, ["adapted"]), (3, ["lookup", "adapted"])):
        given = {"input_ids": ids[:rows], "attention_mask": torch.ones_like(ids[:rows])}
        fast = accelerate(model, mode="speculative", tuned=str(folder), drafts=drafts)
        found = fast.generate(**given, **GREEDY, return_dict_in_generate=True)
        assert torch.equal(found.sequences, model.generate(**given, **GREEDY))
        assert found.accepted > 0


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_an_interrupted_training_goes_on(model, corpus, tmp_path, monkeypatch) -> None:
    settings = settings_of(corpus, tmp_path / "whole")
    settings.head.texts, settings.lora.epochs, settings.lora.dropout = 8, 3, 0.5
    whole = tune_run(settings)
    settings.run.folder = str(tmp_path / "other")

    def stop(_: Any, step: int) -> None:
        if step == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LoraTask, "begin_step", stop)
        tune_run(settings)
    again = tune_run(settings)
    assert again.adapted.meta["after"] == whole.adapted.meta["after"]
    for name, change in whole.adapted.changes.items():
        assert all(map(torch.equal, again.adapted.changes[name], change))
    for one, other in zip(again.adapted.maps, whole.adapted.maps, strict=True):
        assert all(map(torch.equal, one, other))
    # Finished already, and not to be had with other settings in the same folder.
    assert tune_run(settings).adapted.meta == again.adapted.meta
    settings.lora = replace(settings.lora, rank=2)
    with pytest.raises(UserError, match=r"lora\.rank was 8 and is now 2"):
        tune_run(settings)


def test_it_begins_as_the_closed_form(texts) -> None:
    adapter = adapt(make_model())
    scale = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.5
    start = fit_start(adapter, texts, scale, 2)
    layers = EarlyLayers(adapter, start, LoraSettings(layers=2, rank=2)).eval()
    batch = read_texts(texts[:4], scale, torch.device("cpu"))
    pairs = layers(batch.ids_BT, batch.states_BTD, [1, 2])
    hidden = adapter.states(batch.ids_BT)
    for layer, (one, two) in zip((1, 2), pairs, strict=True):
        matrix, bias = start.maps[layer - 1]
        for place in range(1, 6):
            normed = torch.nn.functional.rms_norm(hidden[layer][0, place], (16,))
            for found, before in (
                (one, batch.states_BTD[0, place - 1]),
                (two, one[0, place - 1]),
            ):
                expected = matrix @ torch.cat([normed, before]) + bias
                torch.testing.assert_close(found[0, place], expected, rtol=1e-4, atol=1e-4)
    assert not [name for name in layers.state_dict() if not name.startswith(("down", "up"))][4:]
    assert all(
        float(up.abs().max()) == 0 for up in layers.adapted(start).changes["0.mlp.up_proj"][1:]
    )


def test_what_is_trained_is_what_is_used(texts) -> None:
    """peft's layers in training, merged copies in use."""
    adapter = adapt(make_model())
    start = fit_start(adapter, texts, torch.ones(16), 3)
    layers = EarlyLayers(adapter, start, LoraSettings(layers=3, rank=2, alpha=3.0)).eval()
    with torch.no_grad():
        for up in layers.up:
            up.normal_(generator=torch.Generator().manual_seed(0))
    adapted = layers.adapted(start)
    batch = read_texts(texts[:2], adapted.scale, torch.device("cpu"))
    ((one, _),) = layers(batch.ids_BT, batch.states_BTD, [3])
    hidden = adapt(adapted.layers_of(adapter)).states(batch.ids_BT)[3][0, 4]
    assert float((hidden - adapter.states(batch.ids_BT)[3][0, 4]).abs().max()) > 0.1
    normed = torch.nn.functional.rms_norm(hidden, (16,))
    matrix, bias = adapted.maps[2]
    expected = matrix @ torch.cat([normed, batch.states_BTD[0, 3]]) + bias
    torch.testing.assert_close(one[0, 4], expected, rtol=1e-3, atol=1e-3)


def test_layers_are_dropped_the_later_the_more_often(texts) -> None:
    adapter = adapt(make_model())
    start = fit_start(adapter, texts, torch.ones(16), 3)
    settings = LoraSettings(layers=3, rank=2, dropout=0.6)
    layers = EarlyLayers(adapter, start, settings)
    assert layers.rates == pytest.approx([0.0, 0.6 * (2**0.5 - 1), 0.6])
    ids = texts[0].ids_T[:6].expand(600, -1)
    states = torch.zeros(600, 6, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        pairs = layers.train()(ids, states, [1, 2, 3])
        kept = layers.eval()(ids, states, [1, 2, 3])
    same = [
        (one[0] == two[0]).all((1, 2)).float().mean() for one, two in zip(pairs, kept, strict=True)
    ]
    assert same[0] == 1
    assert float(same[1]) == pytest.approx(1 - layers.rates[1], abs=0.06)
    assert float(same[2]) == pytest.approx((1 - layers.rates[1]) * 0.4, abs=0.06)
    # A text that passes the second layer by has the first one's state there.
    matrix, bias = start.maps[1]
    normed = torch.nn.functional.rms_norm(adapter.states(ids[:1])[1], (16,))
    passed = torch.nn.functional.linear(torch.cat([normed, states[:1]], -1), matrix, bias)
    dropped = ~(pairs[1][0] == kept[1][0]).all((1, 2))
    torch.testing.assert_close(pairs[1][0][dropped][:1], passed, rtol=1e-4, atol=1e-4)


def test_exits_take_turns() -> None:
    task = LoraTask.__new__(LoraTask)
    task.deepest = 4
    assert [task.exits(index) for index in range(4)] == [[4, 1], [4, 2], [4, 3], [4, 1]]
    task.deepest = 1
    assert task.exits(5) == [1]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--lora.layers", "0"], "lora.layers must be at least 1"),
        (["--lora.layers", "4"], "lora.layers must be below 4"),
        (["--lora.layers", "2", "--lora.rank", "0"], "lora.rank must be at least 1"),
        (["--lora.layers", "2", "--lora.alpha", "0"], "lora.alpha must be above 0"),
        (["--lora.layers", "2", "--lora.dropout", "1"], "lora.dropout must be from 0 to below 1"),
        (["--until", "lora"], "give lora.layers"),
    ],
)
def test_wrong_settings_are_refused(words, match, capsys, tmp_path, monkeypatch, corpus) -> None:
    monkeypatch.setattr(ModelChoice, "load", lambda self: (make_model(), make_tokenizer()))
    folder = tmp_path / "run"
    given = ["exit", "tune", "any", "--data", corpus, "--folder", str(folder)]
    assert main([*given, *words]) == 2
    assert match in capsys.readouterr().err and not folder.exists()


def test_without_peft_it_says_what_to_install(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    LoraSettings().check()
    with pytest.raises(UserError, match=r"pip install deepenough\[lora\]"):
        LoraSettings(layers=2).check()


def test_the_command(corpus, tmp_path, capsys) -> None:
    """A head first; then, in the same folder, layers as well, which take part in the choice."""
    model = tmp_path / "model"
    make_model().save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    folder = tmp_path / "run"
    given = ["exit", "tune", str(model), "--data", corpus, "--folder", str(folder)]
    given += ["--text.tokens", "400", "--text.prompt_tokens", "6", "--text.new_tokens", "16"]
    given += ["--text.min_chars", "4", "--text.instructions", "false", "--text.batch", "16"]
    given += ["--head.epochs", "1", "--head.held_out", "8", "--head.shortlist", "25"]
    assert main([*given, "--until", "head"]) == 0
    assert "adapted" not in capsys.readouterr().out
    given += ["--resume", "--lora.layers", "2", "--lora.rank", "2", "--lora.epochs", "1"]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "2 layers" in printed and "adapted" in printed
    tuned = Tuned.from_pretrained(folder)
    assert tuned.adapted.num_layers == 2 and tuned.adapted.meta["lora"]["rank"] == 2
    raced = {(tuple(row["names"]), row["layer"]) for row in tuned.choice["measured"]}
    assert {(("adapted",), 1), (("lookup", "adapted"), 2), ((), None)} <= raced
