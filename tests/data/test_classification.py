"""Labelled texts from every kind of file, and bad rows refused by their number."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepenough.data.classification import Example, open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.errors import UserError


def write(folder: Path, name: str, content: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


def read(path: str, labels: list[str] | None = None, **changes: Any) -> Any:
    return open_classification(path, ClassificationConfig(valid_fraction=0.0, **changes), labels)


def test_csv_tsv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    rows = [("a fine film", 1), ('he said "no", twice', 0), ("ünïcode", 1)]
    quoted = "".join('"{}",{}\n'.format(t.replace('"', '""'), label) for t, label in rows)
    files = {
        "a.csv": "text,label\n" + quoted,
        "a.tsv": "text\tlabel\n" + "".join(f"{t} \t{label}\n" for t, label in rows),
        "a.jsonl": "".join(json.dumps({"text": t, "label": label}) + "\n" for t, label in rows),
    }
    for name, content in files.items():
        found = read(write(tmp_path, name, content))
        assert found.splits["train"] == [Example(t, None, label) for t, label in rows], name
        assert found.labels == ("0", "1")


def test_a_tsv_file_has_no_quoting(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", 'sentence\tlabel\n"a lone mark\t1\nanother\t0\n')
    assert read(path).splits["train"][0].text == '"a lone mark'


def test_a_cell_is_what_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text , label\nNA,no\n 007,yes\nnull,no\n2020-01-01,yes\n")
    rows = read(path).splits["train"]
    assert [row.text for row in rows] == ["NA", "007", "null", "2020-01-01"]
    path = write(tmp_path, "a.jsonl", '{"text": "2020-01-01", "label": 0}\n{"text": 7, "label": 1}')
    assert [row.text for row in read(path).splits["train"]] == ["2020-01-01", "7"]


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_other_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_text("text,label\ncafé,1\nb,0\n", encoding=encoding)
    with pytest.raises(UserError, match=r"a\.csv could not be read as UTF-8 CSV .* decode byte"):
        read(str(tmp_path / "a.csv"))


def test_names_become_numbers_in_alphabetical_order(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text,label\nx,spam\ny,ham\nz,spam\n")
    found = read(path)
    assert found.labels == ("ham", "spam")
    assert [example.label for example in found.splits["train"]] == [1, 0, 1]


def test_pairs_are_found_and_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "premise,hypothesis,gold,label\np,h,1,0\nq,i,0,1\n")
    assert read(path).splits["train"][0] == Example("p", "h", 0)
    found = read(path, text_column="hypothesis", label_column="gold")
    assert found.splits["train"][0] == Example("h", None, 1)
    found = read(path, text_column="hypothesis", pair_column="premise")
    assert found.splits["train"][0] == Example("h", "p", 0)
    with pytest.raises(UserError, match="no pair column 'other'"):
        read(path, text_column="hypothesis", pair_column="other")


def test_a_folder_has_splits_and_else_some_rows_are_held_out(tmp_path: Path) -> None:
    rows = "".join(f"t{i}\t{i % 2}\n" for i in range(40))
    write(tmp_path, "train.tsv", "sentence\tlabel\n" + rows)
    config = ClassificationConfig(valid_fraction=0.25, limit=10)
    found = open_classification(str(tmp_path), config)
    train, valid = found.splits["train"], found.splits["valid"]
    assert (len(train), len(valid)) == (10, 11)
    assert not set(train) & set(valid)
    write(tmp_path, "dev.tsv", "sentence\tlabel\nv\t1\n")
    write(tmp_path, "test-labeled.tsv", "sentence\tlabel\nw\t0\n")
    found = open_classification(str(tmp_path), config)
    assert found.splits["valid"] == [Example("v", None, 1)]
    assert found.splits["test"] == [Example("w", None, 0)]


@pytest.mark.parametrize("test", ["sentence\tlabel\nc\t-1\nd\t-1\n", "index\tsentence\n0\tc\n"])
@pytest.mark.parametrize("named", [None, "label"])
def test_a_test_split_without_labels_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, test: str, named: str | None
) -> None:
    write(tmp_path, "train.tsv", "sentence\tlabel\na\t0\nb\t1\n")
    write(tmp_path, "test.tsv", test)
    assert list(read(str(tmp_path), label_column=named).splits) == ["train"]
    assert caplog.messages == [f"The test split of {tmp_path} has no labels and is left out."]


def test_other_splits_need_labels(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "sentence\tlabel\na\t0\nb\t1\n")
    write(tmp_path, "dev.tsv", "sentence\nc\n")
    with pytest.raises(UserError, match="no label column called label"):
        read(str(tmp_path))


def test_sst2_by_name(data_dir: Path) -> None:
    if not (data_dir / "sst2").is_dir():
        pytest.skip("DEEPENOUGH_DATA has no sst2")
    found = open_classification("sst2", ClassificationConfig())
    assert {split: len(rows) for split, rows in found.splits.items()} == {
        "train": 67349,
        "valid": 872,
        "test": 1821,
    }
    assert found.labels == ("negative", "positive")
    assert found.splits["valid"][0] == Example(
        "it 's a charming and often affecting journey .", None, 1
    )


GOOD = "text,label\nfine,1\ngood,0\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD + "third,\n", r"missing in row 3 of a\.csv"),
        (GOOD + "third\n", "missing in row 3"),
        (GOOD + "third,0.5\n", "'0.5' in row 3 .* not a whole number"),
        (GOOD + "third,spam\n", "'spam' in row 3 .* not a whole number"),
        (GOOD + "third,-2\n", "-2 in row 3 .* out of range"),
        (GOOD + "third,200\n", "200 in row 3 .* far above"),
        (GOOD + " ,1\n", "empty in row 3"),
        (GOOD + "a,1,2\n", r"a\.csv could not be read .* 2 fields in line 4, saw 3"),
        ("text,label\nfine,ham\ngood,1\n", "'1' in row 2 .* the first is a name"),
        ("text,label\nfine,0.5\ngood,1\n", "'0.5' in row 1 .* not a whole number"),
        ("text,label\nfine,0\ngood,0\n", "nothing to learn"),
        ("body,label\nfine,1\n", "no text column called text, .* among body, label"),
        ("text,mark\nfine,1\n", "no label column"),
        ("text,label\n", "no examples"),
        ("", "is empty"),
        ('text,label\n"open,1\n', "as UTF-8 CSV .EOF inside string starting at row 1"),
        ("text,label\nfine,1,2\ngood,0,1\n", "more cells in its rows"),
        ("text,label\nNA,007\n", "nothing to learn"),
    ],
)
def test_bad_rows_are_refused_by_number(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(write(tmp_path, "a.csv", content))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 2 .* no JSON object"),
        ("[1]", "Line 2 .* no JSON object"),
        ("{}", "empty in row 2"),
    ],
)
def test_bad_lines_of_jsonl(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, "a.jsonl", f'{{"text": "x", "label": 0}}\n{line}\n')
    with pytest.raises(UserError, match=said):
        read(path)


def test_labels_beyond_those_of_training_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", GOOD)
    write(tmp_path, "dev.csv", "text,label\nx,0\ny,2\n")
    with pytest.raises(UserError, match=r"2 in row 2 of dev\.csv .* from 0 to 1"):
        read(str(tmp_path))


def test_a_models_labels_are_kept_to(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text,label\nx,positive\ny,1\n")
    rows = read(path, ["negative", "positive"]).splits["train"]
    assert [row.label for row in rows] == [1, 1]
    path = write(tmp_path, "b.csv", "text,label\nx,neutral\n")
    with pytest.raises(UserError, match=r"'neutral' in row 1 .* negative, positive"):
        read(path, ["negative", "positive"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"valid_fraction": 1.0}, "valid_fraction must be at least 0 and below 1"),
    ],
)
def test_impossible_settings(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write(tmp_path, "a.csv", "text,label\nfine,ham\ngood,spam\n")
    with pytest.raises(UserError, match=said):
        open_classification(path, ClassificationConfig(**changes))


@pytest.mark.parametrize("name", ["nowhere", "a.pdf", "folder/nowhere.csv", "../some/where"])
def test_a_name_that_is_nothing_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)
    with pytest.raises(UserError, match=f"no file or folder {name}"):
        read(name)


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table"):
        read(write(tmp_path, "a.txt", "text"))
    with pytest.raises(UserError, match="holds no"):
        read(str(tmp_path))


def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"sentence": ["a", "b"], "label": [0, 1]}
    found = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("hf:owner/name:part", "owner/name:part"):
        texts = read(name)
        assert asked.pop() == (("owner/name", "part"), {"streaming": True})
        assert texts.labels == ("no", "yes")
        assert texts.splits["train"] == [Example("a", None, 0), Example("b", None, 1)]


def test_examples_with_secret_labels_or_of_one_class(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\na\t0\nb\t1\n")
    (folder / "dev.tsv").write_text("sentence\tlabel\na\t0\n")
    (folder / "test.tsv").write_text("sentence\tlabel\nc\t-1\n")
    texts = open_classification(str(folder), ClassificationConfig())
    assert set(texts.splits) == {"train", "valid"}
    (folder / "train.tsv").write_text("sentence\tlabel\na\t1\nb\t1\n")
    with pytest.raises(UserError, match="the same label"):
        open_classification(str(folder), ClassificationConfig())
    (tmp_path / "two.csv").write_text("text,label\na,0\nb,1\n")
    with pytest.raises(UserError, match=r"No training example of .* is left"):
        open_classification(str(tmp_path / "two.csv"), ClassificationConfig(valid_fraction=0.99))


def test_half_a_character_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_text('{"text": "good \\ud83d", "label": 0}\n{"text": "bad", "label": 1}\n')
    texts = open_classification(str(file), ClassificationConfig(valid_fraction=0.0))
    assert texts.split("train")[0].text == "good ?"
