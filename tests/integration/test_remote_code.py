"""Code that comes with a model or a tokenizer is run by no command unless it was asked for."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from deepenough import (
    LazyTransformerConfig,
    LazyTransformerForConditionalGeneration,
    ParConfig,
    ParForCausalLM,
    PonderEncoderForSequenceClassification,
    UserError,
)
from deepenough.__main__ import main
from deepenough.data.tokenizer import train_tokenizer
from deepenough.hf.loading import load

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [
        f"the number {n} comes after the number {n - 1} and is followed by {n + 1}"
        for n in range(200)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class Hostile:
    """Folders whose code writes a file when it is run."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.ran = folder, folder / "ran"
        self.tokenizer = train_tokenizer(text.read_text().split("\n"), 300)
        torch.manual_seed(0)
        size = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2}
        sizes = {"vocab_size": 300, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        self.models = {
            "gpt2": GPT2LMHeadModel(GPT2Config(**sizes, **special)),
            "bert": BertModel(BertConfig(**size, num_hidden_layers=2, intermediate_size=16)),
            "par": ParForCausalLM(
                ParConfig(vocab_size=300, d_model=16, num_heads=2, d_ff=16, pattern="ad")
            ),
            "lazy": LazyTransformerForConditionalGeneration(
                LazyTransformerConfig(vocab_size=300, d_model=16, num_heads=2, d_ff=16)
            ),
        }
        self.models["ponder"] = PonderEncoderForSequenceClassification.from_encoder(
            BertModel(BertConfig(**size, num_hidden_layers=2, intermediate_size=16))
        )

    def code(self, folder: Path) -> None:
        (folder / "own.py").write_text(
            "from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast\n"
            f"open({str(self.ran)!r}, 'w').close()\n"
            "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
            "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
            "class OwnModelForCausalLM(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
        )

    def with_tokenizer(self, kind: str, name: str = "") -> Path:
        """Return a model that transformers knows, whose tokenizer is code."""
        folder = self.folder / (name or kind)
        self.models[kind].save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        content = json.loads(file.read_text())
        content["tokenizer_class"] = "OwnTokenizer"
        content["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        file.write_text(json.dumps(content))
        self.code(folder)
        return folder

    def with_config(self) -> Path:
        """Return a model all of whose parts are code, though its weights are those of a GPT-2."""
        folder = self.with_tokenizer("gpt2", "own")
        content = json.loads((folder / "config.json").read_text())
        content |= {"model_type": "own", "architectures": ["OwnModelForCausalLM"]}
        content["auto_map"] = {
            "AutoConfig": "own.OwnConfig",
            "AutoModel": "own.OwnModelForCausalLM",
            "AutoModelForCausalLM": "own.OwnModelForCausalLM",
        }
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    def with_vocabulary(self) -> Path:
        """Return a folder with nothing but a tokenizer that is code."""
        folder = self.with_tokenizer("gpt2", "tokenizer")
        (folder / "config.json").unlink()
        return folder

    def run_of(self, method: str, **settings: object) -> Path:
        """Return a run folder of a method, with a model whose tokenizer is code."""
        folder = self.folder / f"run-{method}"
        self.with_tokenizer(method, f"run-{method}/model")
        (folder / "config.yaml").write_text(yaml.safe_dump({"method": method, **settings}))
        return folder


@pytest.fixture
def hostile(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    # Where modules are copied to before they are run, and a user who says yes to everything.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return Hostile(tmp_path, text)


def test_no_command_runs_code_that_comes_with_a_model(
    hostile: Hostile, text: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, own, out = hostile.with_tokenizer("bert"), hostile.with_config(), hostile.folder / "out"
    tokenizer = hostile.with_vocabulary()
    par, ponder = hostile.run_of("par"), hostile.run_of("ponder", data=str(reviews))
    lazy = hostile.run_of("lazy", data=str(text), task="translation")
    with_option, without = "--trust-remote-code", "that transformers knows by itself"
    trained = f"--data {text} --out {out}"
    pondering = f"ponder train --data {reviews} --out {out} --model"
    cases = {
        f"shortcut fit {own} {trained}": with_option,
        f"decode generate {own} --prompt the": with_option,
        f"decode tune {own} {trained}": with_option,
        f"{pondering}.encoder {own}": without,
        f"{pondering}.encoder {own}/config.json": without,
        f"{pondering}.encoder {known} --model.tokenizer {tokenizer}": without,
        f"par train --tokenizer {tokenizer} {trained}": without,
        f"par search --tokenizer {own} {trained}": without,
        f"lazy train --task language --tokenizer {tokenizer} {trained}": without,
        f"ponder eval {ponder}": without,
        f"ponder predict {ponder} {text}": without,
        f"par eval {par} --data {text}": without,
        f"par generate {par}": without,
        f"lazy translate {lazy} {text}": without,
        f"lazy eval {lazy}": without,
        f"lazy sweep {lazy}": without,
        f"lazy plot {lazy} --source the": without,
    }
    for words, remedy in cases.items():
        code = main(words.split())
        said = capsys.readouterr().err
        assert not hostile.ran.exists(), words
        assert code == 2, words
        assert "needs code that comes with it, which is not run" in said, f"{words}: {said}"
        assert remedy in said, f"{words}: {said}"
        assert not out.exists(), words
    with pytest.raises(UserError, match="trust_remote_code=True"):
        load(str(own))
    # Where transformers knows the architecture, it needs no code and the model is loaded.
    assert load(str(known))[0].config.model_type == "bert"
    assert not hostile.ran.exists()


def test_a_run_cannot_ask_for_its_own_code(
    hostile: Hostile, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder may come from anybody: what its settings trust counts for nothing."""
    model, run = hostile.with_config(), hostile.folder / "run"
    fit = f"shortcut fit {model} --data {text} --lines 20 --min_chars 1 --out {run}"
    assert main([*fit.split(), "--trust-remote-code"]) == 0
    assert hostile.ran.exists()  # with the option the code is run, and the model works
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["trust_remote_code"] is True
    shortcuts, limits = f"--shortcuts {run}/shortcuts", f"--data {text} --split train"
    sizes = "--limit 1 --prompt_tokens 4 --new_tokens 2 --rounds 1"
    cases = [
        f"shortcut eval {run} {limits} --lines 5",
        f"shortcut lens {run} the",
        f"compare {run} {limits} {sizes} --out {hostile.folder}/compared",
        f"decode calibrate {model} {shortcuts} --data {text} --texts 2",
        f"decode generate {model} {shortcuts} --prompt the --mode early_exit --max_new_tokens 4",
    ]
    for words in cases:
        hostile.ran.unlink(missing_ok=True)
        assert main(words.split()) == 2, words
        assert "--trust-remote-code" in capsys.readouterr().err
        assert not hostile.ran.exists(), words
    for words in (*cases[:3], cases[4]):
        assert main([*words.split(), "--trust-remote-code"]) == 0, capsys.readouterr().err


def test_every_load_says_whether_code_is_trusted() -> None:
    """None may be left to transformers, which asks on standard input."""
    loaders = r"(?:Auto\w+|PreTrained\w+|cls|super\(\))\.(?:from_pretrained|get_config_dict)\("
    found = 0
    for path in sorted(SRC.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for call in re.finditer(loaders, source):
            found += 1
            arguments = source[call.end() : source.index(")\n", call.end())]
            # Where keywords are passed on, they hold it.
            assert re.search(r"trust_remote_code|\*\*(?:kwargs|source)", arguments), (
                f"{path}: {call[0]}{arguments})"
            )
    assert found >= 6
