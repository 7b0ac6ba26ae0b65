"""Corpora by every kind of name, their splits, and what is said when there is none."""

import gzip
import io
import json
import logging
import os
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepenough.data import corpus
from deepenough.data.corpus import BLOCK_LINES, Corpus, open_corpus, read_input_lines
from deepenough.errors import UserError


def numbered(num_lines):
    return [f"line {number}" for number in range(num_lines)]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def test_a_file_is_split_by_blocks(tmp_path):
    lines = numbered(4000)
    corpus = open_corpus(str(write(tmp_path / "book.txt", lines)))
    assert corpus.splits == ("train", "valid", "test")
    parts = {split: list(corpus.lines(split)) for split in corpus.splits}
    assert sorted(line for part in parts.values() for line in part) == sorted(lines)
    assert len(parts["valid"]) == pytest.approx(200, abs=BLOCK_LINES)
    assert len(parts["test"]) == pytest.approx(200, abs=BLOCK_LINES)
    for part in parts.values():
        assert part == sorted(part, key=lines.index)
        assert len(part) % BLOCK_LINES == 0
    assert {split: list(corpus.lines(split)) for split in corpus.splits} == parts


@pytest.mark.parametrize("num_lines", [13, 39, 40, 79, 100, 241, 799])
def test_a_short_text_has_all_splits_too(tmp_path, num_lines):
    lines = numbered(num_lines)
    corpus = open_corpus(str(write(tmp_path / "poem.txt", lines)))
    parts = {split: list(corpus.lines(split)) for split in corpus.splits}
    assert sorted(line for part in parts.values() for line in part) == sorted(lines)
    for split in ("valid", "test"):
        assert 0.02 <= len(parts[split]) / num_lines <= 0.1


@given(st.floats(0, 0.6), st.floats(0, 0.3))
def test_fractions_are_kept(tmp_path_factory, valid, test):
    path = tmp_path_factory.getbasetemp() / "fractions.txt"
    if not path.exists():
        write(path, numbered(6000))
    corpus = open_corpus(str(path), valid_fraction=valid, test_fraction=test)
    for split, fraction in (("valid", valid), ("test", test)):
        if fraction > 0.01:
            num_lines = sum(1 for _ in corpus.lines(split))
            assert num_lines == pytest.approx(fraction * 6000, abs=4 * BLOCK_LINES)


@pytest.mark.parametrize(("valid", "test"), [(-0.1, 0.1), (0.5, 0.5)])
def test_impossible_fractions(tmp_path, valid, test):
    with pytest.raises(UserError, match="together below 1"):
        open_corpus("python", valid_fraction=valid, test_fraction=test)


def test_a_folder_with_named_splits(tmp_path):
    write(tmp_path / "wiki.train.tokens", ["t"])
    write(tmp_path / "wiki.validation.tokens", ["v"])
    write(tmp_path / "wiki.test.tokens", ["s"])
    corpus = open_corpus(str(tmp_path))
    assert [list(corpus.lines(split)) for split in ("train", "valid", "test")] == [
        ["t"],
        ["v"],
        ["s"],
    ]


def test_a_missing_split_is_cut_from_train(tmp_path):
    write(tmp_path / "train.txt", numbered(1000))
    write(tmp_path / "test.txt", ["s"])
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.lines("test")) == ["s"]
    both = [*corpus.lines("train"), *corpus.lines("valid")]
    assert sorted(both) == sorted(numbered(1000))


def test_a_folder_of_any_text(tmp_path):
    write(tmp_path / "b.md", ["b"])
    write(tmp_path / "a" / "c.txt", ["c"])
    write(tmp_path / ".git" / "hidden.txt", ["hidden"])
    write(tmp_path / "image.png", ["no text"])
    corpus = open_corpus(str(tmp_path), valid_fraction=0, test_fraction=0)
    assert corpus.splits == ("train",)
    assert list(corpus.lines("train")) == ["c", "b"]


def test_a_glob(tmp_path):
    for name in ("1.py", "2.py", "3.txt"):
        write(tmp_path / "deep" / name, [name])
    corpus = open_corpus(str(tmp_path / "**" / "*.py"), valid_fraction=0, test_fraction=0)
    assert list(corpus.lines("train")) == ["1.py", "2.py"]


def test_a_name_under_the_data_folder(tmp_path, monkeypatch):
    write(tmp_path / "mine" / "train.txt", numbered(1000))
    monkeypatch.setenv("DEEPENOUGH_DATA", str(tmp_path))
    assert next(open_corpus("mine").lines("train")) == "line 0"


def test_python_prose_is_english_and_stable(own_cache):
    corpus = open_corpus("python")
    lines = [line for split in corpus.splits for line in corpus.lines(split)]
    assert 1_000_000 < sum(len(line) + 1 for line in lines) < 5_000_000
    words = " ".join(lines).split()
    assert words.count("the") > 10_000
    assert corpus.fingerprint("train") == open_corpus("python").fingerprint("train")
    assert len(list((own_cache / "python").iterdir())) == 1


def test_line_ends_and_marks(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n two\x0c\xc2\x85\xe2\x80\xa8 \nlast")
    corpus = open_corpus(str(path), valid_fraction=0, test_fraction=0)
    assert list(corpus.lines("train")) == ["one", "", " two\x0c\x85\u2028 ", "last"]


def test_lines_that_are_answered_as_they_come_have_bad_bytes_replaced(tmp_path, caplog):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\nb\xffd\n\xc3\nfine\n")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            lines = list(read_input_lines(str(path)))
            assert lines == ["good", "b\ufffdd", "\ufffd", "fine"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has bytes that are not UTF-8, the first in line 2: they were replaced by U+FFFD."
    ]
    with pytest.raises(UserError, match=r"bad\.txt is not UTF-8 text \(line 2\)"):
        open_corpus(str(path), valid_fraction=0, test_fraction=0).fingerprint("train")


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "data/**/*.txt", "data/**", "d*/**/b/**/*.txt", ""]
)
def test_links_that_lead_round_in_circles_are_followed_once(tmp_path, monkeypatch, pattern):
    (tmp_path / "data" / "a" / "b").mkdir(parents=True)
    (tmp_path / "data" / "a" / "one.txt").write_text("one\n")
    (tmp_path / "data" / "a" / "b" / "two.txt").write_text("two\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "three.txt").write_text("three\n")
    for number in range(3):  # without memory these would be 3 to the power of 40 paths
        (tmp_path / "data" / "a" / f"round{number}").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "again.txt").symlink_to(tmp_path / "data" / "a" / "one.txt")
    monkeypatch.chdir(tmp_path)
    corpus = open_corpus(pattern or "data", valid_fraction=0, test_fraction=0)
    lines = sorted(corpus.lines("train"))
    expected = {"d*/**/b/**/*.txt": ["two"], "": ["one", "two"]}
    assert lines == expected.get(pattern, ["one", "three", "two"])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_two_bytes_a_character_are_refused(tmp_path, encoding):
    path = tmp_path / "windows.txt"
    path.write_text("\ufeffsome text\n", encoding=encoding)
    with pytest.raises(UserError, match=r"windows\.txt is UTF-16 text: save it as UTF-8"):
        list(open_corpus(str(path), valid_fraction=0, test_fraction=0).lines("train"))


@given(st.text(alphabet="aé\u20ac\U0001f600 ", max_size=80))
def test_very_long_lines_are_cut_between_characters(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "long.txt"
    path.write_text(text + "\nnext\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "MAX_LINE_BYTES", 7)
        lines = list(corpus.read_lines([path]))
    assert lines[-1] == "next"
    assert "".join(lines[:-1]) == text
    assert all(len(line.encode()) <= 7 + 4 for line in lines)


def test_the_fingerprint_is_of_the_content(tmp_path):
    one = open_corpus(str(write(tmp_path / "one.txt", numbered(999))))
    same = open_corpus(str(write(tmp_path / "same.txt", numbered(999))))
    other = open_corpus(str(write(tmp_path / "other.txt", [*numbered(998), "line 998 "])))
    for split in one.splits:
        assert one.fingerprint(split) == same.fingerprint(split)
    assert any(one.fingerprint(split) != other.fingerprint(split) for split in one.splits)


@pytest.mark.parametrize("name", ["./nowhere.txt", "/nowhere/at/all", "no*where"])
def test_missing(name, monkeypatch):
    monkeypatch.delenv("DEEPENOUGH_DATA", raising=False)
    with pytest.raises(UserError, match=r"no file, folder or glob.*DEEPENOUGH_DATA \(unset\)"):
        open_corpus(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("wikitxt-2", "wikitext-2"), ("pyton", "python"), ("mytxt.txt", "mytext.txt")],
)
def test_a_mistyped_name_gets_the_nearest_without_asking_a_hub(tmp_path, monkeypatch, name, meant):
    (tmp_path / "data" / "wikitext-2").mkdir(parents=True)
    (tmp_path / "mytext.txt").write_text("a line\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPENOUGH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("deepenough.data.corpus.open_splits", pytest.fail)
    with pytest.raises(UserError, match=rf"Did you mean {meant}\?"):
        open_corpus(name)


def test_empty(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="is empty"):
        open_corpus(str(tmp_path / "empty.txt"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="holds no text file"):
        open_corpus(str(tmp_path / "folder"))


def test_too_short_to_hold_out(tmp_path):
    corpus = open_corpus(str(write(tmp_path / "short.txt", ["one line"])))
    with pytest.raises(UserError, match=r"valid split .* is empty"):
        corpus.lines("valid")
    with pytest.raises(UserError, match="no split 'dev'"):
        corpus.lines("dev")


@pytest.fixture
def hub(monkeypatch):
    """A hub that serves the given splits, counting how often it is asked."""

    def serve(splits):
        asked = []

        def load_dataset(name, config=None, *, streaming):
            asked.append((name, config))
            assert streaming
            if isinstance(splits, Exception):
                raise splits
            import datasets

            return datasets.IterableDatasetDict(
                {
                    split: datasets.IterableDataset.from_generator(lambda rows=rows: iter(rows))
                    for split, rows in splits.items()
                }
            )

        import datasets

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return serve


def test_hub_rows_are_streamed_once(hub):
    asked = hub(
        {
            "train": [{"text": "a\nb"}, {"text": "c"}],
            "validation": [{"text": "v"}],
            "unsupervised": [{"text": "never"}],
        }
    )
    for _ in range(2):
        corpus = open_corpus("hf:owner/name", test_fraction=0)
        assert corpus.splits == ("train", "valid")
        assert list(corpus.lines("train")) == ["a", "b", "c"]
        assert list(corpus.lines("valid")) == ["v"]
    assert asked == [("owner/name", None)]


def test_hub_config_and_column(hub):
    asked = hub({"train": [{"body": "words", "id": 1}]})
    corpus = open_corpus("hf:name:config:body", valid_fraction=0, test_fraction=0)
    assert list(corpus.lines("train")) == ["words"]
    assert asked == [("name", "config")]
    with pytest.raises(UserError, match="no column 'text' but body, id"):
        open_corpus("hf:name:config")


def test_hub_is_asked_for_what_is_not_local(hub):
    asked = hub({"train": [{"text": "words"}]})
    assert list(open_corpus("owner/name", valid_fraction=0, test_fraction=0).lines("train"))
    assert asked == [("owner/name", None)]


def test_hub_without_train(hub):
    hub({"test": [{"text": "words"}]})
    with pytest.raises(UserError, match="no train split: it has test"):
        open_corpus("hf:owner/name")


def test_hub_out_of_reach(hub):
    hub(ConnectionError("no network\nand a long story"))
    with pytest.raises(UserError) as error:
        open_corpus("owner/name")
    message = str(error.value)
    for part in ("hub did not give it", "the path of your data", "DEEPENOUGH_DATA"):
        assert part in message
    assert "\n" not in message


# -- texts of few lines, packed texts, rows --------------------------------------------------


@pytest.mark.parametrize("lines", [1, 3])
def test_a_text_of_few_lines_is_cut_between_words(tmp_path, lines):
    words = [f"word{number}" for number in range(3000)]
    size = len(words) // lines
    text = [" ".join(words[i : i + size]) for i in range(0, len(words), size)]
    corpus = open_corpus(str(write(tmp_path / "text8", text)))
    assert corpus.cut_at_end
    parts = {split: " ".join(corpus.lines(split)).split() for split in corpus.splits}
    assert parts["train"] + parts["valid"] + parts["test"] == words
    assert len(parts["valid"]) == pytest.approx(150, abs=9)
    assert len(parts["test"]) == pytest.approx(150, abs=9)


def test_a_line_of_megabytes_is_one_text(tmp_path, monkeypatch):
    """What reading has cut for memory's sake are no lines; without spaces it is cut anywhere."""
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 100)
    text = "0123456789" * 1000
    (tmp_path / "long.txt").write_text(text)
    found = open_corpus(str(tmp_path / "long.txt"), valid_fraction=0.1, test_fraction=0.2)
    parts = {split: "".join(found.lines(split)) for split in found.splits}
    assert parts["train"] + parts["valid"] + parts["test"] == text
    assert len(parts["test"]) == pytest.approx(2000, abs=30)


def test_packed_texts_are_read_as_what_they_are(tmp_path):
    lines = numbered(50)
    plain = write(tmp_path / "plain" / "train.txt", lines)
    for name in ("book.txt.gz", "book.txt", "no_ending"):  # by content, whatever the name says
        packed = tmp_path / name
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert (
            list(open_corpus(str(packed), valid_fraction=0, test_fraction=0).lines("train"))
            == lines
        )
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt.gz").write_bytes(gzip.compress(f"{split}\n".encode()))
    corpus = open_corpus(str(folder))
    assert {split: list(corpus.lines(split)) for split in corpus.splits} == {
        split: [split] for split in ("train", "valid", "test")
    }


@pytest.mark.parametrize("damage", [slice(0, 60), slice(0, 5)])
def test_a_damaged_packed_text_is_refused(tmp_path, damage):
    whole = gzip.compress("\n".join(numbered(500)).encode())
    (tmp_path / "half.gz").write_bytes(whole[damage])
    with pytest.raises(UserError, match=r"half\.gz cannot be read .*whole text file"):
        open_corpus(str(tmp_path / "half.gz"))


def test_zstandard_needs_its_package_and_is_read_with_it(tmp_path, monkeypatch):
    path = tmp_path / "book.txt.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"line 1\nline 2\n")
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"compressed by Zstandard: pip install zstandard"):
        open_corpus(str(path))
    package = types.ModuleType("zstandard")
    package.open = lambda file, mode: io.BytesIO(file.read()[4:])
    monkeypatch.setitem(sys.modules, "zstandard", package)
    found = open_corpus(str(path), valid_fraction=0, test_fraction=0)
    assert list(found.lines("train")) == ["line 1", "line 2"]


@pytest.mark.parametrize("column", ["text", "content"])
def test_rows_of_json_are_their_texts(tmp_path, column):
    rows = [{"id": n, column: f"first {n}\nsecond {n}"} for n in range(30)]
    lines = [line for n in range(30) for line in (f"first {n}", f"second {n}")]
    path = write(tmp_path / "data" / "rows.jsonl", map(json.dumps, rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for place in (path, path.parent, tmp_path / "rows.jsonl.gz"):
        corpus = open_corpus(str(place), valid_fraction=0, test_fraction=0)
        assert list(corpus.lines("train")) == lines
    write(path.parent / "notes.txt", ["note"])  # of a folder with texts, rows are no part
    folder = open_corpus(str(path.parent), valid_fraction=0, test_fraction=0)
    assert list(folder.lines("train")) == ["note"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            '{"title": "x"}',
            r"Row 2 of .* has no text but title: call the column .* text or content",
        ),
        ('{"text": 3}', "Row 2 of"),
        ("plain", "Line 2 of .* is no JSON object"),
    ],
)
def test_rows_without_a_text_are_refused(tmp_path, row, sentence):
    path = write(tmp_path / "rows.jsonl", ['{"text": "x"}', row])
    with pytest.raises(UserError, match=sentence):
        list(open_corpus(str(path), valid_fraction=0, test_fraction=0).lines("train"))


# -- streams of datasets -----------------------------------------------------------------------


def rows_of(path, texts, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({column: text}) + "\n" for text in texts)
    return path


def parquet_of(path, texts):
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=2)
    return path


@pytest.mark.parametrize(("write_rows", "suffix"), [(rows_of, "jsonl"), (parquet_of, "parquet")])
def test_a_stream_has_the_lines_of_the_copy_and_leaves_none(
    tmp_path, own_cache, write_rows, suffix
):
    texts = ["a\nb", "", "of Éa 日本\u2028 no line end", "windows\r\n", "c"]
    write_rows(tmp_path / "set" / f"train.{suffix}", texts)
    write_rows(tmp_path / "set" / f"validation.{suffix}", ["v"])
    name = str(tmp_path / "set")
    stream = open_corpus(f"hf-stream:{name}", test_fraction=0)
    assert not own_cache.exists()
    copy = open_corpus(f"hf:{name}", test_fraction=0)
    assert stream.splits == copy.splits == ("train", "valid")
    for split in stream.splits:
        assert list(stream.lines(split)) == list(stream.lines(split)) == list(copy.lines(split))


def test_a_stream_is_known_without_being_read(tmp_path, monkeypatch):
    rows_of(tmp_path / "set" / "train.jsonl", [f"line {number}" for number in range(200)])
    monkeypatch.setenv("DEEPENOUGH_DATA", str(tmp_path))
    name = "hf-stream:set"

    def known(**settings):
        corpus = open_corpus(name, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(Corpus, "lines", None)
            return tuple(corpus.fingerprint(split) for split in corpus.splits)

    first = known()
    assert len(set(first)) == 3
    assert known() == first
    assert known(valid_fraction=0.1)[0] != first[0]
    parts = [
        line for split in ("train", "valid", "test") for line in open_corpus(name).lines(split)
    ]
    assert sorted(parts) == sorted(f"line {number}" for number in range(200))
    path = rows_of(tmp_path / "set" / "train.jsonl", ["others"] * 200)
    os.utime(path, (1e9, 1e9))
    assert not set(known()) & set(first)


def test_a_stream_is_refused_as_a_copy_is(tmp_path, monkeypatch):
    rows_of(tmp_path / "set" / "train.jsonl", ["words"] * 60, column="body")
    name = f"hf-stream:{tmp_path / 'set'}"
    with pytest.raises(UserError, match="no column 'text' but body"):
        open_corpus(name)
    assert len(list(open_corpus(f"{name}::body").lines("train"))) > 40
    monkeypatch.setattr(corpus, "_column", broken)
    with pytest.raises(UserError, match=r"broke off \(ConnectionError: reset\): repeat"):
        open_corpus(name)
    with pytest.raises(UserError, match="hub did not give it"):
        open_corpus("hf-stream:nobody/nothing")


def broken(*_):
    yield "a line"
    raise ConnectionError("reset\nby peer")
