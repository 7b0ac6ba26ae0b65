"""bAbI stories as pairs of texts, from both forms of its files."""

from pathlib import Path

import pytest

from deepenough.data.classification import ClassificationConfig, Example, open_classification
from deepenough.data.tasks import read_stories
from deepenough.errors import UserError

TASK_1 = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? |bathroom|1
4 Daniel went back to the hallway.
5 Where is Daniel? \thallway\t4
1 Sandra moved to the garden.
2 Where is Sandra?\tgarden\t1
"""


@pytest.fixture
def babi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "babi" / "en"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"qa1_single-supporting-fact_{split}.txt").write_text(TASK_1)
    (folder / "qa19_path-finding_train.txt").write_text("1 A is north of B.\n2 How?\ts,e\t1\n")
    monkeypatch.setenv("DEEPENOUGH_DATA", str(tmp_path))
    return folder


def test_a_question_is_about_all_statements_before_it(babi: Path) -> None:
    rows = [values for _, values in read_stories(next(babi.glob("qa1_*train*")))]
    assert [(row["text"], row["pair"], row["label"]) for row in rows] == [
        ("Mary moved to the bathroom. John went to the hallway.", "Where is Mary?", "bathroom"),
        (
            "Mary moved to the bathroom. John went to the hallway. "
            "Daniel went back to the hallway.",
            "Where is Daniel?",
            "hallway",
        ),
        ("Sandra moved to the garden.", "Where is Sandra?", "garden"),
    ]


def test_by_name_as_classification(babi: Path) -> None:
    found = open_classification("babi:1", ClassificationConfig(valid_fraction=0.0))
    assert found.labels == ("bathroom", "garden", "hallway")
    assert found.splits["test"][2] == Example("Sandra moved to the garden.", "Where is Sandra?", 1)
    found = open_classification("babi:1,19", ClassificationConfig(valid_fraction=0.0))
    assert found.labels == ("bathroom", "garden", "hallway", "s,e")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("babi:21", "tasks 1 to 20"),
        ("babi:x", "tasks 1 to 20"),
        ("babi:2", "file of bAbI task 2"),
    ],
)
def test_what_is_not_there_is_refused(babi: Path, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_classification(name, ClassificationConfig())


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "qa1_x_train.txt"
    path.write_text("Once upon a time\n")
    with pytest.raises(UserError, match="Line 1"):
        list(read_stories(path))


def test_all_real_tasks(data_dir: Path) -> None:
    if not (data_dir / "babi").is_dir():
        pytest.skip("DEEPENOUGH_DATA has no babi")
    found = open_classification("babi", ClassificationConfig())
    assert len(found.splits["test"]) == 20 * 1000
    one = open_classification("babi:1", ClassificationConfig(valid_fraction=0.1))
    assert len(one.splits["train"]) + len(one.splits["valid"]) == 1000
    assert len(one.labels) == 6
