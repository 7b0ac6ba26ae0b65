"""bAbI (Weston et al., arXiv 1502.05698) as classification: story and question in, answer out.

A file is a list of numbered lines; a number 1 begins a story. A line with an answer behind a tab
(or `|`, in some copies) is a question about all statements of its story so far. Each question is
one example: the statements are the text, the question its pair, and the answer, even one of several
words, its label. The supporting facts that follow the answer are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepenough.data.corpus import candidates
from deepenough.data.table_rows import Row
from deepenough.data.text_files import read_lines
from deepenough.errors import UserError

BABI = "babi"
NUM_TASKS = 20
_QUESTION = re.compile(r"(?P<question>[^\t|]+)[\t|](?P<answer>[^\t|]+)")
_FILE = re.compile(r"qa(?P<task>\d+)_.*_(?P<split>train|valid|test)\.txt")


def read_babi(name: str) -> tuple[dict[str, Iterable[Row]], tuple[str, ...]]:
    """The examples of `babi` (all tasks), `babi:7` or `babi:1,2,3` by split, and all answers.

    Some lists of things are asked for only in the test split. They are answers that a model has no
    example of, not mistakes in the files, and count against it.
    """
    tasks = _tasks(name)
    folder = next(
        (p for place in candidates(BABI) for p in (place / "en", place) if _files(p)), None
    )
    if folder is None:
        raise UserError(
            "bAbI is neither here nor under $DEEPENOUGH_DATA: put its files qa1_..._train.txt "
            "and so on into a folder babi there."
        )
    splits: dict[str, list[Path]] = {}
    for task in tasks:
        found = {split: path for (number, split), path in _files(folder).items() if number == task}
        if "train" not in found:
            raise UserError(f"The folder {folder} has no training file of bAbI task {task}.")
        for split, path in found.items():
            splits.setdefault(split, []).append(path)
    rows: dict[str, Iterable[Row]] = {s: list(_rows(paths)) for s, paths in splits.items()}
    answers = {row.values["label"] for split in rows.values() for row in split}
    return rows, tuple(sorted(answers))


def _tasks(name: str) -> list[int]:
    _, _, given = name.partition(":")
    if not given:
        return list(range(1, NUM_TASKS + 1))
    numbers = [part.strip() for part in given.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= NUM_TASKS for part in numbers):
        raise UserError(
            f"bAbI has tasks 1 to {NUM_TASKS}, given as babi:7 or babi:1,2: got {name}."
        )
    return [int(part) for part in numbers]


def _files(folder: Path) -> dict[tuple[int, str], Path]:
    if not folder.is_dir():
        return {}
    matches = ((path, _FILE.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return {(int(m["task"]), m["split"]): path for path, m in matches if m is not None}


def _rows(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        yield from read_stories(path)


def read_stories(path: Path) -> Iterator[Row]:
    """One row a question, with the statements of its story before it."""
    story: list[str] = []
    for number, line in enumerate(read_lines([path]), start=1):
        position, _, content = line.strip().partition(" ")
        if not position:
            continue
        if not position.isdigit():
            raise UserError(
                f"Line {number} of {path.name} does not begin with a number, as lines of bAbI do."
            )
        if position == "1":
            story = []
        question = _QUESTION.match(content)
        if question is None:
            story.append(content.strip())
            continue
        yield Row(
            f"line {number} of {path.name}",
            {
                "text": " ".join(story),
                "pair": question["question"].strip(),
                "label": question["answer"].strip(),
            },
        )
