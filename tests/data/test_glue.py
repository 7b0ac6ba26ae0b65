"""The tasks of GLUE in the form of its own files, and as the hub has them."""

from pathlib import Path
from typing import Any

import pytest

from deepenough.data import classification
from deepenough.data.classification import Example, LabelledTexts, open_classification
from deepenough.data.config import MULTI_LABEL, REGRESSION, ClassificationConfig
from deepenough.data.tasks import TASKS
from deepenough.errors import UserError

FILES: dict[str, dict[str, str]] = {
    "CoLA": {
        "train.tsv": "gj04\t1\t\tThe cat sat.\ngj04\t0\t*\tSat cat the.\n",
        "dev.tsv": "ad03\t1\t\tThe dog ran.\n",
        "test.tsv": "index\tsentence\n0\tSomething else.\n",
    },
    "SST-2": {
        "train.tsv": "sentence\tlabel\na warm film\t1\na dull film\t0\n",
        "dev.tsv": "sentence\tlabel\ngood\t1\n",
    },
    "MRPC": {
        "train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t7\t8\tHe said "so.\tSo he said.\n0\t1\t2\tA cat.\tA dog.\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA.\tA!\n",
    },
    "STS-B": {
        "train.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\t"
        "sentence2\tscore\n0\tm\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t5.000\n"
        "1\tm\tf\t2012\t1\tn\tn\tA man.\tA cat.\t0.25\n",
        "dev.tsv": "index\tgenre\tsentence1\tsentence2\tscore\n0\tm\tA.\tA.\t3.8\n",
    },
    "QQP": {
        "train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "1\t2\t3\tWhy?\tHow come?\t1\n4\t5\t6\tWho?\tWhere?\t0\n",
    },
    "MNLI": {
        "train.tsv": "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\tg\tIt rains.\tIt is wet.\tneutral\tentailment\n"
        "1\tg\tIt rains.\tIt is dry.\tneutral\tcontradiction\n",
        "dev_matched.tsv": "index\tgenre\tsentence1\tsentence2\tgold_label\n"
        "0\tg\tA.\tB.\tneutral\n",
        "dev_mismatched.tsv": "index\tgenre\tsentence1\tsentence2\tgold_label\n"
        "0\tx\tC.\tD.\tcontradiction\n",
        "test_mismatched.tsv": "index\tgenre\tsentence1\tsentence2\n0\tx\tC.\tD.\n",
    },
    "QNLI": {
        "train.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tA man.\tentailment\n"
        "1\tWhen?\tA man.\tnot_entailment\n",
    },
    "RTE": {
        "train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n"
        "1\tA.\tA.\tentailment\n",
    },
    "WNLI": {
        "train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tIt broke.\tThe cup broke.\t1\n"
        "1\tIt broke.\tThe hand broke.\t0\n",
    },
}
FIRST = {
    "cola": Example("The cat sat.", None, 1),
    "sst2": Example("a warm film", None, 1),
    "mrpc": Example('He said "so.', "So he said.", 1),
    "stsb": Example("A plane.", "An air plane.", 5.0),
    "qqp": Example("Why?", "How come?", 1),
    "mnli": Example("It rains.", "It is wet.", 0),
    "qnli": Example("Who?", "A man.", 0),
    "rte": Example("A.", "B.", 1),
    "wnli": Example("It broke.", "The cup broke.", 1),
}


def read(data: str, **options: Any) -> LabelledTexts:
    return open_classification(data, ClassificationConfig(valid_fraction=0.0, **options))


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder, files in FILES.items():
        (tmp_path / "glue" / folder).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / "glue" / folder / name).write_text(content, "utf-8")
    monkeypatch.setenv("DEEPENOUGH_DATA", str(tmp_path))
    return tmp_path / "glue"


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_read_by_its_name(glue: Path, task: str) -> None:
    found = read(task)
    assert found.splits["train"][0] == FIRST[task]
    assert found.labels == TASKS[task].labels and found.metrics == TASKS[task].metrics
    assert found.problem == TASKS[task].problem
    again = read(str(glue / TASKS[task].folder))
    assert again.splits == found.splits and again.labels == found.labels


def test_mnli_keeps_its_two_sets_apart(glue: Path) -> None:
    found = read("mnli")
    assert found.splits["valid"] == [Example("A.", "B.", 1)]
    assert found.splits["valid_mismatched"] == [Example("C.", "D.", 2)]
    assert set(found.splits) == {"train", "valid", "valid_mismatched"}
    assert set(read("cola").splits) == {"train", "valid"}  # the labels of the test set are secret


def test_the_hubs_columns_are_read_as_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "qnli": {"question": "Who?", "sentence": "A man.", "label": 0, "idx": 0},
        "mnli": {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0, "idx": 0},
        "stsb": {"sentence1": "A plane.", "sentence2": "An air plane.", "label": 5.0, "idx": 0},
    }
    asked: list[tuple[str, str | None]] = []

    def splits(repository: str, part: str | None) -> dict[str, Any]:
        asked.append((repository, part))
        return {"train": [rows[str(part)], rows[str(part)] | {"label": 1}]}

    monkeypatch.setattr(classification, "open_splits", splits)
    for task in rows:
        for name in (task, f"hf:glue:{task}", f"hf:nyu-mll/glue:{task}"):
            assert read(name).splits["train"][0] == FIRST[task]
    assert asked[:2] == [("nyu-mll/glue", "qnli"), ("glue", "qnli")]


def test_other_columns_in_a_folder_of_that_name_are_read_as_usual(tmp_path: Path) -> None:
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "train.csv").write_text("text,label\nfine,good\npoor,bad\n")
    assert read(str(tmp_path / "rte")).splits["train"][0].text == "fine"


def test_several_labels_are_lists_or_stand_between_commas(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text('text,label\na,"warm, long"\nb,\nc,dull\n')
    found = read(str(table), problem_type=MULTI_LABEL)
    assert found.labels == ("dull", "long", "warm") and found.metrics == ("f1", "accuracy")
    labels = [(0.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)]
    assert [example.label for example in found.splits["train"]] == labels
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "a", "label": ["warm, long", "dull"]}\n{"text": "b", "label": []}\n')
    assert read(str(lines), problem_type=MULTI_LABEL).labels == ("dull", "warm, long")
    with pytest.raises(UserError, match="holds neither text nor a number"):
        read(str(lines))


def test_values_must_be_numbers(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label\na,-0.5\nb,3\n")
    found = read(str(table), problem_type=REGRESSION)
    assert [example.label for example in found.splits["train"]] == [-0.5, 3.0]
    table.write_text("text,label\na,1.5\nb,good\n")
    with pytest.raises(UserError, match="The label 'good' in row 2"):
        read(str(table), problem_type=REGRESSION)
