"""`deepenough cutoffs` as a user runs it: `main(argv)` in this process."""

import json

import numpy as np
import pytest

from deepenough.__main__ import main
from deepenough.nn.cutoffs import optimal_cutoffs

COUNTS = [50, 20, 10, 5, 5, 5, 3, 2]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(map(str, COUNTS)))
    return str(path)


def test_json_is_one_object(counts, capsys):
    assert main(["cutoffs", "--counts", counts, "--clusters", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    expected = optimal_cutoffs(COUNTS, 3)
    assert out.count("\n") == 1
    assert result["cutoffs"] == expected.cutoffs
    assert result["cost"] == expected.cost
    assert 0 <= result["seconds"] < 1
    assert (result["clusters"], result["vocab_size"]) == (3, 8)
    assert err == ""


@pytest.mark.parametrize("flags", [["--json"], ["--json", "true"], ["--json=true"]])
def test_json_flag_with_and_without_value(counts, capsys, flags):
    assert main(["cutoffs", *flags, "--counts", counts, "--clusters=1"]) == 0
    assert json.loads(capsys.readouterr().out)["cutoffs"] == []


def test_table(counts, capsys):
    assert main(["cutoffs", "--counts", counts, "--clusters", "2"]) == 0
    out = capsys.readouterr().out
    assert str(optimal_cutoffs(COUNTS, 2).cutoffs) in out
    assert "tail 1" in out


def test_tokens_are_counted_and_sorted(tmp_path, capsys):
    path = tmp_path / "ids.npy"
    np.save(path, np.repeat([3, 0, 1, 7], [50, 3, 20, 1]))
    assert main(["cutoffs", "--tokens", str(path), "--clusters", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cutoffs"] == optimal_cutoffs([50, 20, 3, 1, 0, 0, 0, 0], 3).cutoffs
    assert "were not in descending order" in err
    assert err.count("\n") == 1


def test_keep_order_cuts_the_ids_as_they_are(tmp_path, capsys):
    path = tmp_path / "counts.txt"
    path.write_text("0 0 0 50 20 1 0")
    for flag in ("--keep_order", "--keep-order"):
        assert main(["cutoffs", "--counts", str(path), "--clusters", "3", "--json", flag]) == 0
        out, err = capsys.readouterr()
        expected = optimal_cutoffs([0, 0, 0, 50, 20, 1, 0], 3)
        assert json.loads(out)["cutoffs"] == expected.cutoffs
        assert json.loads(out)["cost"] == expected.cost
        assert err == ""


def test_raw_tokens_with_their_type(tmp_path, capsys):
    path = tmp_path / "ids.bin"
    np.array([0, 0, 0, 1, 1, 2], dtype=np.uint16).tofile(path)
    words = ["--tokens", str(path), "--dtype", "uint16", "--vocab-size", "9", "--clusters", "2"]
    assert main(["cutoffs", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 9


def test_measured_mode(counts, capsys):
    words = ["cutoffs", "--counts", counts, "--measure", "--d-model", "8", "--batch-tokens", "16"]
    assert main([*words, "--max-clusters", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cutoffs"]) == result["clusters"] - 1 <= 1
    assert result["measured_seconds"] > 0
    assert main([*words, "--clusters", "2"]) == 0
    out = capsys.readouterr().out
    assert "Chosen: [" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "either --counts FILE or --tokens FILE"),
        (["--counts", "{counts}", "--tokens", "{counts}"], "either --counts FILE or"),
        (["--counts", "{counts}"], "how many clusters"),
        (["--counts", "{counts}", "--clusters", "0"], "at least 1"),
        (["--counts", "{counts}", "--clusters", "-2"], "at least 1"),
        (["--counts", "{counts}", "--clusters", "9"], "from 1 to 8"),
        (["--counts", "{counts}", "--clusters", "two"], "whole number"),
        (["--counts", "{counts}", "--clusters", "9", "--measure"], "from 1 to 8"),
        (["--counts", "{counts}", "--measure", "--div-value", "0.5"], "at least 1"),
        (["--counts", "{counts}", "--clusters", "2", "--dtype", "uint16"], "belong to --tokens"),
        (["--counts", "missing.txt", "--clusters", "2"], "does not exist"),
        (["--tokens", "missing.npy", "--clusters", "2"], "does not exist"),
        (["--counts", "{counts}", "--cluster", "2"], "clusters"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(counts, capsys, words, sentence):
    assert main(["cutoffs", *(word.format(counts=counts) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("deepenough: error: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_help_has_an_example(capsys):
    assert main(["cutoffs", "--help"]) == 0
    out = capsys.readouterr().out
    assert "example:" in out
    for flag in ("--counts", "--tokens", "--clusters", "--json", "--measure"):
        assert flag in out


def test_wikitext_agrees_with_the_published_cuts(data_dir, tmp_path, capsys):
    """The system this method comes from reports [455, 3507]: the last words inside, not cutoffs."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = data_dir / "par" / "wiki2_12k.model"
    text = data_dir / "wikitext-2" / "train.txt"
    if not (model.is_file() and text.is_file()):
        pytest.skip("WikiText-2 or its tokenizer is not in DEEPENOUGH_DATA")
    encoder = sentencepiece.SentencePieceProcessor(model_file=str(model))
    lines = [line.strip().lower() for line in text.read_text("utf-8").splitlines() if line.strip()]
    ids = np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoder.encode(lines)])
    ids.tofile(tmp_path / "ids.bin")
    words = ["--tokens", str(tmp_path / "ids.bin"), "--dtype", "uint16", "--vocab_size", "12000"]
    assert main(["cutoffs", *words, "--clusters", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cutoffs"] == pytest.approx([456, 3508], abs=2)
    assert result["seconds"] < 0.2
