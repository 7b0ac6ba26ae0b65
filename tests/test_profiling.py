"""`deepenough profile`: one model, four stages, one page and one JSON file."""

import importlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deepenough as de
from deepenough import profiling
from deepenough.__main__ import main
from deepenough.errors import UserError
from deepenough.runs import read_records

WORDS = [f"word{number}" for number in range(40)]
SMALL = ["--prompts", "2", "--prompt_tokens", "8", "--new_tokens", "6", "--rounds", "2"]
STAGES = ("maps between the layers", "what every layer knows", "token by token", "generation")


def make_texts(num: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=12)) for _ in range(num)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers and its tokenizer of words."""
    folder = tmp_path_factory.mktemp("llama")
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
        eos_token_id=1, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for split, num, seed in (("train", 60, 0), ("valid", 20, 1)):
        (folder / f"{split}.txt").write_text("\n".join(make_texts(num, seed)) + "\n")
    return folder


def run(llama: Path, text: Path, out: Path, *more: str) -> int:
    prompt = ["--prompt", "word1 word2 word3"]
    words = ["profile", str(llama), "--data", str(text), "--out", str(out), *prompt, *SMALL]
    return main([*words, *more])


@pytest.fixture(scope="module")
def finished(llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profiles") / "whole"
    assert run(llama, text, out) == 0
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished profile, to be changed."""
    shutil.copytree(finished, tmp_path / "whole")
    return tmp_path / "whole"


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "profile.json").read_text())


def test_one_command_leaves_a_verdict_a_page_and_a_run(finished, llama, text, capsys):
    found = content(finished)
    assert (found["model"], found["kind"], found["layers"]) == (str(llama), "causal", 3)
    assert tuple(found["stages"]) == STAGES
    assert {row["mode"] for row in found["decided"]} == {"id", "mat"}
    assert {row["agreement"] for row in found["saved"]} == {0.9, 0.95, 0.99}
    ways = {point["mechanism"] for point in found["generation"]}
    assert {"transformers", "full", "speculative"} <= ways
    page = (finished / "report.html").read_text()
    assert len(page) < 1_000_000 and page.count("<h2") == 2
    kinds = {record.kind for record in read_records(finished / "metrics.jsonl")[0]}
    assert {"fit", "evaluation", "decided", "saved", "lens"} <= kinds
    # All that is said on the page first is what is printed, and follows from the files.
    capsys.readouterr()
    assert run(llama, text, finished) == 0
    told = capsys.readouterr()
    for verdict in found["verdict"]:
        assert f"- {verdict['sentence']}\n" in told.out
    assert told.out.rstrip().endswith(f"page: {finished / 'report.html'}")
    assert told.err.count("done before") == 4
    assert main(["shortcut", "lens", str(finished), "--prompt", "word5"]) == 0
    assert main(["report", str(finished), "--out", str(finished / "report.html")]) == 0


def test_every_verdict_has_its_interval_or_says_that_nothing_is_certain(finished):
    said = [verdict["sentence"] for verdict in content(finished)["verdict"]]
    assert len(said) >= 3
    certain = [sentence for sentence in said if " to " in sentence]
    assert all(
        sentence.startswith(("No layer is saved for certain", "Most tokens"))
        for sentence in said
        if sentence not in certain
    )


def test_only_what_a_changed_setting_decides_is_done_again(out, llama, text, capsys):
    assert run(llama, text, out, "--prompt", "word7 word8") == 0
    told = capsys.readouterr().err
    assert "[3/4] token by token: again, since this has changed: prompt" in told
    assert told.count("done before") == 3
    assert run(llama, text, out, "--prompt", "word7 word8", "--new_tokens", "5") == 0
    told = capsys.readouterr().err
    assert "[4/4] generation: again, since this has changed: timing" in told
    assert told.count("done before") == 3


def test_a_changed_text_is_said_and_measured(out, llama, tmp_path, capsys):
    before = content(out)
    other = tmp_path / "other"
    other.mkdir()
    for split, num in (("train", 50), ("valid", 20)):
        (other / f"{split}.txt").write_text("\n".join(make_texts(num, 7)) + "\n")
    assert run(llama, other, out) == 0
    told = capsys.readouterr().err
    assert "done before" not in told
    assert told.count("again, since this has changed: text") == 4
    assert content(out)["decided"] != before["decided"]


def test_another_model_is_refused_and_nothing_changes(out, llama, text, tmp_path, capsys):
    other = tmp_path / "other"
    model, tokenizer = de.load(str(llama))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    before = (out / "profile.json").read_bytes()
    assert run(other, text, out) == 2
    assert (
        f"{out} holds the profile of {llama}, whose weights are others" in capsys.readouterr().err
    )
    assert (out / "profile.json").read_bytes() == before
    assert run(other, text, out, "--overwrite") == 0
    assert content(out)["model"] == str(other)


def test_an_interrupted_profile_goes_on(llama, text, tmp_path, capsys, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        frontier = importlib.import_module("deepenough.compare.frontier")
        patch.setattr(frontier, "run_comparison", interrupted)
        assert run(llama, text, out) == 130
    told = capsys.readouterr().err
    assert "go on with: deepenough profile" in told
    assert tuple(content(out)["stages"]) == STAGES[:3]
    maps = (out / "shortcuts" / "shortcuts.safetensors").stat().st_mtime_ns
    assert run(llama, text, out) == 0
    assert capsys.readouterr().err.count("done before") == 3
    assert (out / "shortcuts" / "shortcuts.safetensors").stat().st_mtime_ns == maps
    assert tuple(content(out)["stages"]) == STAGES


def test_a_model_that_cannot_be_left_early_is_still_profiled(out, llama, text, capsys, monkeypatch):
    whole = profiling.Profile._candidate

    def refuse_exits(self: Any, settings: Any) -> Any:
        if "exit" in settings.mechanisms:
            raise UserError("Its cache cannot be filled: use speculate().")
        return whole(self, settings)

    monkeypatch.setattr(profiling.Profile, "_candidate", refuse_exits)
    monkeypatch.setattr(profiling, "WAYS", ("transformers", "full", "exit"))
    assert run(llama, text, out, "--new_tokens", "4") == 0
    found = content(out)
    assert {point["mechanism"] for point in found["generation"]} == {"transformers", "full"}
    if any(row["lambda"] is not None for row in found["saved"] if row["mode"] == "mat"):
        assert "Early exit was not measured: Its cache" in found["notes"][0]
        assert "Early exit was not measured" in (out / "report.html").read_text()


def test_an_encoder_has_no_generation(tiny_bert, reviews, tmp_path, capsys):
    lines = (reviews / "train.tsv").read_text().splitlines()[1:]
    (tmp_path / "text.txt").write_text("\n".join(line.split("\t")[0] for line in lines * 3) + "\n")
    out = tmp_path / "out"
    words = ["profile", str(tiny_bert), "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    assert main([*words, "--min_chars", "1", "--eval_lines", "16"]) == 0
    assert "[2/2] what every layer knows" in capsys.readouterr().err
    found = content(out)
    assert found["kind"] == "encoder" and found["generation"] == []
    (verdict,) = found["verdict"]
    assert "of the last layer's states" in verdict["sentence"] or "No layer" in verdict["sentence"]
    assert not (out / "frontier.json").exists()


def test_the_same_from_python(llama, tmp_path):
    model, tokenizer = de.load(str(llama))
    options = {"prompts": 2, "prompt_tokens": 8, "new_tokens": 4, "rounds": 1}
    options |= {"prompt": "word1 word2", "out": str(tmp_path / "out")}
    found = de.profile(model, tokenizer, make_texts(60), **options)
    assert found["verdict"] and (tmp_path / "out" / "report.html").is_file()
    written = content(tmp_path / "out")
    assert {name: written[name] for name in found} == json.loads(json.dumps(found))
    with pytest.raises(UserError, match="20 texts are too few: give at least 50"):
        de.profile(model, tokenizer, make_texts(20), out=str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_what_is_wrong_is_said_before_anything_is_written(out, llama, text, tmp_path, capsys):
    (out / "profile.json").write_text('{"stages"')
    assert run(llama, text, out) == 2
    assert "profile.json is damaged" in capsys.readouterr().err
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.yaml").write_text("method: par\n")
    assert run(llama, text, other) == 2
    assert "holds another run: choose another folder" in capsys.readouterr().err
    assert run(llama, text, tmp_path / "new", "--prompt_tokens", "9999") == 2
    assert "less than one prompt of 9999" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
