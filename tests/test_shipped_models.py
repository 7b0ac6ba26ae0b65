"""Trained models that ship: made from a run, found by name, unpacked once, used like a run."""

import importlib.util
import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deepenough as de
from deepenough import runs
from deepenough.data.classification import open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.data.corpus import open_corpus
from deepenough.errors import UserError
from deepenough.runs import Record, append_record, find_run, read_records

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("ship", ROOT / "models" / "ship.py")
ship = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ship)


@pytest.fixture
def shipped(tmp_path, monkeypatch, tiny_bert):
    """A package with one model, installed; a tiny BERT stands for it."""
    run = tmp_path / "run"
    shutil.copytree(tiny_bert, run / "model")
    (run / "config.yaml").write_text("method: par\n")
    for step in range(1000):
        append_record(run / "metrics.jsonl", Record(step, "train", {"loss": 1.0}))
    append_record(run / "metrics.jsonl", Record(999, "valid", {"loss": 2.0}))
    package = tmp_path / "installed" / "deepenough_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "deepenough_models", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return ship.ship(run, "par-wikitext2", package)


def test_a_name_gives_a_run_folder_with_32_bit_weights(shipped, tiny_bert):
    packed = load_file(shipped / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in packed.values()} == {torch.float16}
    folder = find_run("par-wikitext2")
    wide = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(wide[name], packed[name].float()) for name in packed)
    records, damaged = read_records(folder / "metrics.jsonl")
    assert damaged == 0 and 200 <= len(records) <= 210 and records[-1].kind == "valid"
    (model, _), (whole, _) = de.load("par-wikitext2"), de.load(str(tiny_bert))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(model(ids)[0], whole(ids)[0], atol=1e-2, rtol=1e-2)
    append_record(folder / "metrics.jsonl", Record(0, "evaluation", {"loss": 3.0}))
    assert find_run("par-wikitext2") == folder
    assert len(read_records(folder / "metrics.jsonl")[0]) == len(records) + 1, "it is not kept"
    ship.keep_measurements(shipped)  # and ships with the next version
    assert read_records(shipped / "metrics.jsonl") == read_records(folder / "metrics.jsonl")


def test_a_folder_of_that_name_comes_first(shipped, tmp_path):
    (tmp_path / "par-wikitext2").mkdir()
    assert find_run("par-wikitext2") == Path("par-wikitext2")
    assert find_run("elsewhere") == Path("elsewhere")


def test_what_is_not_installed_or_damaged_is_said(shipped, monkeypatch):
    weights = shipped / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="not the file that was saved"):
        find_run("par-wikitext2")
    (shipped / "model" / "checksums.json").unlink()
    with pytest.raises(UserError, match="force-reinstall"):
        find_run("par-wikitext2")
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps deepenough-models"):
        find_run("par-wikitext2")


def test_a_smaller_vocabulary_leaves_its_words_as_they_were(tiny_bert, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_bert, folder)
    whole, tokenizer = de.load(str(tiny_bert))
    words = [word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 1]
    text = " ".join(words[:4])
    single = sum(len(piece.removeprefix("##")) == 1 for piece in tokenizer.get_vocab())
    ship.keep_pieces(folder, [text], 5 + single + 4)
    small, own = de.load(str(folder))
    assert len(own) == 5 + single + 4 < len(tokenizer)
    assert small.config.vocab_size == len(own)
    found, expected = (
        m(**t(text, return_tensors="pt"))[0] for m, t in ((small, own), (whole, tokenizer))
    )
    assert torch.equal(found, expected)
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == own.get_vocab()


def test_a_model_that_is_not_in_the_package_is_said(shipped):
    with pytest.raises(UserError, match="has no lazy-multi30k"):
        find_run("lazy-multi30k")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """The scores on a model's card; the package is the repository's."""
    monkeypatch.syspath_prepend(ROOT / "models" / "src")
    monkeypatch.delitem(sys.modules, "deepenough_models", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = ROOT / "models" / "src" / "deepenough_models"
    return lambda name: json.loads((folder / name / "scores.json").read_text())


needs_data = pytest.mark.skipif("DEEPENOUGH_DATA" not in os.environ, reason="needs DEEPENOUGH_DATA")


@needs_data
def test_the_classifier_answers_as_its_card_says(card):
    examples = open_classification("sst2", ClassificationConfig()).splits["test"][:200]
    model, tokenizer = de.load("ponder-sst2")
    texts = tokenizer([e.text for e in examples], padding=True, return_tensors="pt")
    answers = model(**texts).logits.argmax(-1)
    accuracy = (answers == torch.tensor([e.label for e in examples])).double().mean()
    stated, low = (
        card("ponder-sst2")["accuracy, labelled test set, saved exit"].split(" to ")[0].split(" (")
    )
    assert float(low) - 0.04 <= accuracy <= float(stated) + 0.06, "of 200 sentences"


@needs_data
def test_the_language_model_reads_as_its_card_says(card):
    model, tokenizer = de.load("par-wikitext2")
    lines = list(open_corpus("wikitext-2").lines("test"))[:120]
    ids = tokenizer("\n".join(lines).lower(), return_tensors="pt").input_ids[:, :2048]
    total, memories = 0.0, None
    for start in range(0, ids.shape[1] - 1, 32):
        read, targets = ids[:, start : start + 32], ids[:, start + 1 : start + 33]
        output = model(read[:, : targets.shape[1]], targets=targets, memories=memories)
        total, memories = total + float(output.loss) * targets.shape[1], output.memories
    perplexity = math.exp(total / (ids.shape[1] - 1))
    stated = float(card("par-wikitext2")["perplexity, test"].split()[0])
    assert 0.4 * stated < perplexity < 1.6 * stated, "of the first 2,000 tokens"
