"""Counts read from text and counted in token files, and every way they can be wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from deepenough.errors import UserError
from deepenough.nn import word_counts
from deepenough.nn.word_counts import count_tokens, read_counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"5 3\n2\t1\n\n", [5, 3, 2, 1]),
        (b"7", [7]),
        (b"0.5 .25 2.5e-1", [0.5, 0.25, 0.25]),
        (b"the\t10\nof\t5\r\n\n", [10, 5]),
        (b"1984\t10\n2001\t5\n", [10, 5]),  # words may be numbers
        ("\n\n\u2581\t10\n\u2028x y\t5".encode(), [10, 5]),
        (b" \t10\n\xff\xfe\t5\n", [10, 5]),  # in any encoding, white space too
        (b"a\tb\t10\n", None),
        (b"\xef\xbb\xbf5 3", [5, 3]),
    ],
)
def test_counts_in_text(tmp_path, text, expected):
    (tmp_path / "counts").write_bytes(text)
    if expected is None:
        with pytest.raises(UserError, match=r"'a' in .* is not a number"):
            read_counts(tmp_path / "counts")
        return
    counts = read_counts(tmp_path / "counts")
    assert counts.tolist() == expected
    whole = all(isinstance(value, int) for value in expected)
    assert counts.dtype == (np.int64 if whole else np.float64)


def test_counts_beyond_64_bits_become_floats(tmp_path):
    (tmp_path / "counts").write_text(f"{2**70} {2**63} 1")
    assert read_counts(tmp_path / "counts").tolist() == [2.0**70, 2.0**63, 1.0]
    (tmp_path / "counts").write_text(f"{2**63 - 1} 1")
    assert read_counts(tmp_path / "counts").tolist() == [2**63 - 1, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no counts"),
        (" \n\t\n", "holds no counts"),
        ("1 2 x", "'x' in .* is not a number"),
        ("the\t3\nof\n", "'of' in .* is not a number"),
        ("3 -1", "not negative"),
        ("3 nan", "finite"),
        ("3 inf", "finite"),
        (f"3 1{'0' * 400}", "finite"),
        ("0 0 0", "all zero"),
    ],
)
def test_bad_counts_are_refused(tmp_path, text, sentence):
    (tmp_path / "counts").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_counts(tmp_path / "counts")


def test_missing_file_and_folder(tmp_path):
    for read in (read_counts, count_tokens):
        with pytest.raises(UserError, match="does not exist"):
            read(tmp_path / "nothing")
        with pytest.raises(UserError, match="is a folder"):
            read(tmp_path)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_raw_and_npy_tokens(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(word_counts, "_IDS_AT_ONCE", 7)  # blocks must add up
    ids = np.random.default_rng(0).integers(0, 20, 100).astype(dtype)
    expected = np.bincount(ids).tolist()
    ids.tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", ids)
    assert count_tokens(tmp_path / "ids.npy").tolist() == expected
    assert count_tokens(tmp_path / "ids.bin", dtype).tolist() == expected
    assert count_tokens(tmp_path / "ids.bin", dtype, 25).tolist() == [*expected, *[0] * 5]


def test_token_folder_of_the_cache(tmp_path):
    tokens = pytest.importorskip("deepenough.data.tokens")
    counts = tokens.Counts(vocab_size=6, num_tokens=4, num_lines=1, num_words=1, num_bytes=1)
    np.array([1, 1, 3, 0], dtype=tokens.id_type(6)).tofile(tmp_path / tokens.IDS_FILE)
    (tmp_path / tokens.COUNTS_FILE).write_text(json.dumps(vars(counts)))
    assert count_tokens(tmp_path).tolist() == [1, 2, 0, 1, 0, 0]
    assert count_tokens(tmp_path / tokens.IDS_FILE).tolist() == [1, 2, 0, 1, 0, 0]
    (tmp_path / tokens.COUNTS_FILE).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        count_tokens(tmp_path)


def test_bad_token_files_are_refused(tmp_path):
    raw, array = tmp_path / "ids.bin", tmp_path / "ids.npy"
    raw.write_bytes(b"123")
    with pytest.raises(UserError, match="say which with --dtype"):
        count_tokens(raw)
    with pytest.raises(UserError, match="no multiple of 2 bytes"):
        count_tokens(raw, "uint16")
    raw.write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        count_tokens(raw, "uint16")
    np.array([-1, 5]).tofile(raw)
    with pytest.raises(UserError, match="no words"):
        count_tokens(raw, "int64")
    np.array([2**40]).tofile(raw)
    with pytest.raises(UserError, match="no words"):
        count_tokens(raw, "int64")
    array.write_bytes(b"not an array")
    with pytest.raises(UserError, match="not a readable"):
        count_tokens(array)
    np.save(array, np.zeros((2, 2), dtype=int))
    with pytest.raises(UserError, match="one row of whole numbers"):
        count_tokens(array)
    np.save(array, np.zeros(3))
    with pytest.raises(UserError, match="one row of whole numbers"):
        count_tokens(array)
    np.save(array, np.arange(5))
    with pytest.raises(UserError, match="vocabulary of 5 words"):
        count_tokens(array, vocab_size=4)


def test_reading_counts_needs_no_model_library(tmp_path):
    """`deepenough cutoffs --counts` must not wait seconds for transformers to load."""
    (tmp_path / "counts").write_text("3 2 1")
    code = (
        "import sys; from deepenough.__main__ import main; "
        f"main(['cutoffs', '--counts', {str(tmp_path / 'counts')!r}, '--clusters', '2']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
