"""Parallel text: found by name, paired line by line, refused with both counts or the bad line."""

import json
import logging
import sys
from pathlib import Path

import pytest

from deepenough.config import validate
from deepenough.data.config import TranslationDataConfig
from deepenough.data.translation import (
    EncodedPairs,
    Pair,
    Sentences,
    encode_pairs,
    joint_tokenizer,
    open_parallel,
    read_pairs,
)
from deepenough.errors import UserError


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        stem, _, language = name.rpartition("_")
        (folder / f"{stem}.{language}").write_bytes(text.encode())
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path / "text",
        train_en="one\ntwo\nthree\n",
        train_de="eins\nzwei\ndrei\n",
        val_en="four\n",
        val_de="vier\n",
        test_2016_en="five\n",
        test_2016_de="fünf\n",
        test_2017_en="six\n",
        test_2017_de="sechs\n",
    )


def test_a_folder_with_splits(folder):
    text = open_parallel(str(folder), TranslationDataConfig())
    assert text.splits == ("train", "valid", "test")
    assert list(text.pairs("train")) == [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    assert list(text.pairs("test")) == [Pair("five", "fünf")]


def test_the_other_direction_and_another_test(folder):
    dataset = TranslationDataConfig(source="de", target="en", test="test_2017")
    text = open_parallel(str(folder), dataset)
    assert list(text.pairs("test")) == [Pair("sechs", "six")]


def test_a_folder_of_the_data_variable(folder, monkeypatch):
    monkeypatch.setenv("DEEPENOUGH_DATA", str(folder.parent))
    assert open_parallel("text", TranslationDataConfig()).splits == ("train", "valid", "test")


def test_training_files_alone_are_divided_into_splits(tmp_path):
    lines = [f"line {number}" for number in range(120)]
    write(tmp_path, train_en="\n".join(lines), train_de="\n".join(map(str.upper, lines)))
    text = open_parallel(str(tmp_path), TranslationDataConfig())
    parts = {split: list(text.pairs(split)) for split in text.splits}
    assert [len(parts[split]) for split in ("train", "valid", "test")] == [114, 3, 3]
    assert {pair.source for part in parts.values() for pair in part} == set(lines)


@pytest.mark.parametrize("num", [1, 2])
def test_too_few_pairs_to_hold_some_out(tmp_path, num):
    write(tmp_path, train_en="a\n" * num, train_de="b\n" * num)
    text = open_parallel(str(tmp_path), TranslationDataConfig())
    with pytest.raises(UserError, match=r"The train split .* holds no pair with text: give such"):
        list(text.pairs("train"))


def test_other_test_files_are_of_folders_only():
    with pytest.raises(UserError, match=r"hf:news is no folder with several test files: leave out"):
        open_parallel("hf:news", TranslationDataConfig(test="other"))


def test_files_of_different_lengths_are_named_with_their_counts(tmp_path):
    folder = write(tmp_path, train_en="a\nb\nc\nd\n", train_de="a\nb\n")
    text = open_parallel(str(folder), TranslationDataConfig())
    with pytest.raises(UserError, match=r"train\.de has 2 lines, but .*train\.en has more"):
        list(text.pairs("train"))
    with pytest.raises(UserError, match=r"train\.de has 2 lines, but .*train\.en has more"):
        list(read_pairs(tmp_path / "train.de", tmp_path / "train.en"))


def test_empty_lines_are_dropped_in_pairs_and_counted_once(tmp_path, caplog):
    folder = write(tmp_path, train_en="a\n\nc\nd\n", train_de="a\nb\n  \nd\n")
    text = open_parallel(str(folder), TranslationDataConfig())
    text = type(text)(text.name, {"train": text.sources["train"].args[0]})  # nothing held out
    with caplog.at_level(logging.WARNING):
        assert list(text.pairs("train")) == [("a", "a"), ("d", "d")]
        list(text.pairs("train"))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "2 of 4 pairs have an empty side and were left out."
    ]


def test_another_encoding_is_refused_with_its_line(folder):
    (folder / "train.de").write_bytes("eins\nzwei\nfünf\n".encode("latin-1"))
    text = open_parallel(str(folder), TranslationDataConfig())
    with pytest.raises(
        UserError, match=r"train\.de is not UTF-8 text \(line 3\): give a text file, or convert it"
    ):
        list(text.pairs("train"))


def test_two_bytes_a_character_are_refused(folder):
    (folder / "train.de").write_bytes("eins\nzwei\nfünf\n".encode("utf-16"))
    text = open_parallel(str(folder), TranslationDataConfig())
    with pytest.raises(UserError, match=r"train\.de is UTF-16 text: save it as UTF-8"):
        list(text.pairs("train"))


def test_line_ends_and_a_byte_order_mark_are_no_text(tmp_path):
    (tmp_path / "a.en").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "a.de").write_bytes(b"eins\nzwei")
    assert list(read_pairs(tmp_path / "a.en", tmp_path / "a.de")) == [
        ("one", "eins"),
        ("two", "zwei"),
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "fr"}, r"has no training text: it needs files train\.en and train\.fr"),
        ({"test": "test_2018"}, r"has no pair of files test_2018\.en"),
    ],
)
def test_what_is_missing_is_said(folder, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        open_parallel(str(folder), TranslationDataConfig(**changes))


@pytest.mark.parametrize("name", ["./nothing", "nothing", "/no/such/folder"])
def test_a_name_that_is_nothing_is_refused_without_asking_a_hub(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = f"There is no folder {name}, here or under .DEEPENOUGH_DATA: give one with train.en"
    with pytest.raises(UserError, match=sentence):
        open_parallel(name, TranslationDataConfig())


def test_a_mistyped_name_gets_the_nearest(folder, monkeypatch):
    monkeypatch.setenv("DEEPENOUGH_DATA", str(folder.parent))
    with pytest.raises(UserError, match=r"for the hub\. Did you mean text\?"):
        open_parallel("texts", TranslationDataConfig())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"batch_tokens": 100}, "batch of 100 tokens cannot hold a sentence of 128"),
        ({"target": "en"}, "both 'en'"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        validate(TranslationDataConfig(**changes))


# -- ids ---------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(folder, shared_cache):
    lines = "a man rides a red bike\na woman walks her dog\n" * 20
    write(folder, train_en=lines, train_de="ein mann\neine frau\n" * 20)
    dataset = TranslationDataConfig(vocab_size=280, cache=str(shared_cache))
    return joint_tokenizer(open_parallel(str(folder), dataset), dataset)


def test_any_character_comes_back(tokenizer):
    pairs = [Pair("a man 🚲 ж", "ein 漢字 mann")]
    encoded = encode_pairs(pairs, tokenizer, 64, "given", truncate=True)
    for side, text in ((encoded.source, pairs[0].source), (encoded.target, pairs[0].target)):
        ids = side[0].tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[:-1]) == text


def test_long_sentences_are_left_out_of_training_and_cut_elsewhere(tokenizer, caplog):
    pairs = [Pair("a man", "ein mann"), Pair("a red bike " * 30, "ein mann")]
    with caplog.at_level(logging.WARNING):
        training = encode_pairs(pairs, tokenizer, 20, "train", truncate=False)
        measured = encode_pairs(pairs, tokenizer, 20, "test", truncate=True)
    assert len(training) == 1
    assert len(measured) == 2 and measured.pairs == pairs
    assert measured.source.lengths.max() == 20
    assert measured.source[1][-1] == tokenizer.eos_token_id
    assert "train: 1 of 2 pairs are longer than 20 tokens and were left out." in caplog.messages
    assert "test: 1 of 2 pairs are longer than 20 tokens and were cut." in caplog.messages
    with pytest.raises(UserError, match="All 1 pairs of train are longer than 20 tokens"):
        encode_pairs(pairs[1:], tokenizer, 20, "train", truncate=False)


def test_a_batch_is_padded_on_each_side():
    pairs = EncodedPairs(Sentences([[5, 6, 2], [7, 2]]), Sentences([[8, 2], [9, 10, 2]]), 3, [])
    batch = pairs.batch([1, 0])
    assert batch["input_ids"].tolist() == [[7, 2, 3], [5, 6, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["targets"].tolist() == [[9, 10, 2], [8, 2, -100]]


def test_sentences_are_one_array():
    sentences = Sentences([[1, 2], [3]])
    sentences.append([4, 5, 6])
    assert [sentences[row].tolist() for row in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert sentences.ids.tolist() == [1, 2, 3, 4, 5, 6] and sentences.ids.itemsize == 4
    assert sentences.starts.tolist() == [0, 2, 3, 6] and sentences.lengths.tolist() == [2, 1, 3]


def test_multi30k(data_dir):
    if not (data_dir / "multi30k").is_dir():
        pytest.skip("multi30k is not among the local corpora")
    text = open_parallel("multi30k", TranslationDataConfig(test="test_2016_flickr"))
    assert [sum(1 for _ in text.pairs(split)) for split in text.splits] == [29000, 1014, 1000]


ROWS = [("a dog\nruns", "ein Hund rennt"), ("a man", None), ("two dogs", "zwei Hunde")]


@pytest.fixture(params=["one column", "a column each"])
def dataset(request, tmp_path, monkeypatch) -> Path:
    """A dataset as `datasets` reads it, without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"en": source, "de": target} for source, target in ROWS]
    if request.param == "one column":
        rows = [{"translation": row} for row in rows]
    for split in ("train", "validation"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_a_dataset_gives_pairs_and_its_missing_split_is_held_out(dataset, caplog):
    text = open_parallel(f"hf:{dataset}", TranslationDataConfig())
    assert text.splits == ("train", "valid", "test")
    assert list(text.pairs("valid")) == [
        ("a dog runs", "ein Hund rennt"),
        ("two dogs", "zwei Hunde"),
    ]
    assert "1 of 3 pairs have an empty side and were left out." in caplog.text
    assert list(text.pairs("test")) == [("a dog runs", "ein Hund rennt")]
    assert list(text.pairs("train")) == [("two dogs", "zwei Hunde")]


def test_a_dataset_without_the_language_says_which_it_has(dataset):
    text = open_parallel(f"hf:{dataset}", TranslationDataConfig(target="fr"))
    with pytest.raises(UserError, match="has no language 'fr' but en, de"):
        list(text.pairs("train"))


def test_a_translation_column_that_is_text_is_refused(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text(json.dumps({"translation": "ein Hund"}) + "\n")
    text = open_parallel(f"hf:{tmp_path}", TranslationDataConfig())
    with pytest.raises(UserError, match="has no language 'en' but none"):
        list(text.pairs("valid"))
