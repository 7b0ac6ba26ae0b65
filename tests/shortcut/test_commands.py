"""`deepenough shortcut` from a model and a text to pictures, as a user runs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from deepenough import Shortcuts
from deepenough.__main__ import main
from deepenough.config import resolve
from deepenough.runs import read_records
from deepenough.shortcut.config import ShortcutFitConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 30, "n_layer": 3, "n_head": 2, "n_embd": 8}
    GPT2LMHeadModel(
        GPT2Config(n_positions=32, bos_token_id=1, eos_token_id=1, **sizes)
    ).save_pretrained(folder)
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 30)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 30, (400, 16), generator=generator).tolist()
    file.write_text("\n".join(" ".join(f"w{number}" for number in row) for row in rows))
    return file


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "shortcut"
    words = [str(model), "--data", str(text), "--out", str(folder), "--maps", "both"]
    tuning = ["--tuned", "--train.steps", "4", "--batch", "32", "--held-out", "16"]
    assert main(["shortcut", "fit", *words, *tuning, "--top-tokens", "null"]) == 0
    return folder


def kinds(run: Path) -> set[str]:
    return {record.kind for record in read_records(run / "metrics.jsonl")[0]}


def test_fit_leaves_maps_settings_and_a_record(run: Path, model: Path) -> None:
    shortcuts = Shortcuts.from_pretrained(run / "shortcuts")
    assert shortcuts.mode == "mat" and len(shortcuts.pairs) == 6
    assert sorted(shortcuts.tuned) == [0, 1, 2]
    assert Shortcuts.from_pretrained(run / "affine").pairs == [(0, 3), (1, 3), (2, 3)]
    config = run / "config.yaml"
    assert resolve(ShortcutFitConfig, config).model.name == str(model)
    assert yaml.safe_load(config.read_text())["method"] == "shortcut"
    assert "fit" in kinds(run)
    maps = {path.relative_to(run).parts[0] for path in run.rglob("*.safetensors")}
    # The maps are on disk once, beside the checkpoint of the tuning.
    assert maps == {"shortcuts", "affine", "tuning"}
    assert not list(run.rglob("statistics-*")) and not (run / "tuning" / "model").exists()


def test_eval_lens_and_plot(run: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a second measurement takes the place of the first
        words = ["--data", str(text), "--lines", "12", "--submodules"]
        assert main(["shortcut", "eval", str(run), *words]) == 0
        output = capsys.readouterr().out
        for mode in ("id", "mat", "affine", "tuned", "attention", "feed_forward", "norms"):
            assert f" {mode} " in output
        records = read_records(run / "metrics.jsonl")[0]
        assert sum(record.kind == "layer" for record in records) == 7 * 4
        assert {"fit", "evaluation", "r2", "cka", "exit", "saved"} <= kinds(run)
    assert main(["shortcut", "lens", str(run), "--prompt", "w3 w4 w5", "--mode", "affine"]) == 0
    output = capsys.readouterr().out
    assert "layer" in output and "w3" in output and "lens" in kinds(run)
    assert main(["shortcut", "plot", str(run)]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.split()}
    assert {"r2.png", "cka.pdf", "layers.png", "submodules.png", "early_exit.png"} <= written


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fit", "no-such-model"], "no-such-model"),
        (["fit", "MODEL", "--min-chars", "9999"], "has 9999 characters"),
        (["fit", "MODEL", "--split", "tset"], "has no split 'tset'"),
        (["fit", "MODEL", "--lines", "5", "--positions", "random"], "positions"),
        (["eval", "TMP"], "run"),
        (["lens", "RUN", ""], "token"),
        (["lens", "RUN", "--prompt", "w1 w2", "--mode", "mta"], "mta"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str],
    sentence: str,
    model: Path,
    text: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = {"MODEL": str(model), "RUN": str(run), "TMP": str(tmp_path)}
    given = [names.get(word, word) for word in words]
    if words[0] == "fit":
        given += ["--data", str(text), "--out", str(tmp_path / "new")]
    assert main(["shortcut", *given]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("deepenough: error: ")
    assert sentence in error


def test_a_run_in_the_way_is_refused_and_a_finished_fit_resumes(
    run: Path, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "shortcut",
        "fit",
        str(model),
        "--data",
        str(text),
        "--out",
        str(run),
        "--maps",
        "both",
    ]
    assert main(words) == 2
    assert "--resume" in capsys.readouterr().err
    before = Shortcuts.from_pretrained(run / "shortcuts")
    assert main([*words, "--resume"]) == 0
    after = Shortcuts.from_pretrained(run / "shortcuts")
    assert torch.equal(after.matrix(0, 3), before.matrix(0, 3))
    assert after.tuned.keys() == before.tuned.keys()
    assert main([*words, "--resume", "--ridge", "3"]) == 2
    assert "holds another fit, with ridge = 0.0 where this has 3.0" in capsys.readouterr().err


def test_overwrite_replaces_its_own_run_and_only_once_all_else_is_good(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["shortcut", "fit", str(model), "--out", str(folder), "--overwrite"]
    good = [*words, "--data", str(text), "--maps", "both"]
    for _ in range(2):
        assert main(good) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "shortcuts").iterdir()}
    assert main([*words, "--data", str(tmp_path / "missing.txt")]) == 2
    (folder / "mine.txt").write_text("by hand")
    assert main(good) == 2
    assert "it holds mine.txt" in capsys.readouterr().err
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "shortcuts").iterdir()}
    assert before == after
