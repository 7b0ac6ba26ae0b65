"""Labelled examples as rows of CSV, TSV and JSONL files and of bAbI, each with its place.

The place ("row 3 of train.tsv (line 4)") goes into every complaint about a row. It is why files are
read with `csv` and `json` here and not with `datasets`, which does not say where a bad row stands,
takes texts such as "NA" for missing and guesses types; `datasets` reads what lies on the hub.

A TSV file has no quoting, as GLUE's have none: a quotation mark there is part of a text. CSV files
have it. Both begin with a line of column names; a line of JSONL names its own.

bAbI (Weston et al., arXiv 1502.05698) is numbered lines, of which a number 1 begins a story. A line
with an answer behind a tab (or `|`, in some copies) is a question about all statements of its story
so far. Each question is one example: the statements are the text, the question its pair, and the
answer, even one of several words, its label. The supporting facts after the answer are not used.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepenough.data.corpus import candidates, read_lines
from deepenough.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
LONGEST_CELL = 1 << 24

BABI = "babi"
NUM_BABI_TASKS = 20
_QUESTION = re.compile(r"(?P<question>[^\t|]+)[\t|](?P<answer>[^\t|]+)")
_BABI_FILE = re.compile(r"qa(?P<task>\d+)_.*_(?P<split>train|valid|test)\.txt")


class ExampleRow(NamedTuple):
    """One row of a file, its values by column."""

    place: str
    """Such as `row 3 of train.tsv`; rows are counted from 1, the line of names left out."""
    values: Mapping[str, Any]


def read_tables(paths: Sequence[Path]) -> Iterator[ExampleRow]:
    """Yield the rows of CSV, TSV and JSONL files in order."""
    for path in paths:
        suffix = path.suffix.lower()
        if suffix not in TABLE_SUFFIXES:
            raise UserError(
                f"{path} is no table of examples: give a file that ends in "
                f"{', '.join(TABLE_SUFFIXES)}."
            )
        yield from _read_jsonl(path) if suffix == ".jsonl" else _read_csv(path, suffix == ".tsv")


def _read_csv(path: Path, tabs: bool) -> Iterator[ExampleRow]:
    csv.field_size_limit(LONGEST_CELL)
    options: dict[str, Any] = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    )
    rows = csv.reader((f"{line}\n" for line in read_lines([path])), **options)
    try:
        names = next(rows, None)
        if names is None:
            raise UserError(f"{path} is empty: its first line must name its columns.")
        names = [name.strip() for name in names]
        for number, cells in enumerate(filter(None, rows), start=1):  # an empty line is no row
            place = f"row {number} of {path.name} (line {rows.line_num})"
            if len(cells) > len(names):
                raise UserError(
                    f"In {place} there are {len(cells)} cells, but the first line names "
                    f"{len(names)} columns: correct one of the two."
                )
            yield ExampleRow(place, dict(zip(names, cells, strict=False)))
    except csv.Error as error:
        raise UserError(
            f"{path} is not valid {'TSV' if tabs else 'CSV'} at line {rows.line_num}: {error}."
        ) from error


def _read_jsonl(path: Path) -> Iterator[ExampleRow]:
    lines = ((line, text) for line, text in enumerate(read_lines([path]), start=1) if text.strip())
    for number, (line, text) in enumerate(lines, start=1):
        place = f"row {number} of {path.name} (line {line})"
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"In {place} there is no valid JSON: correct or remove it.") from error
        if not isinstance(values, dict):
            raise UserError(f'In {place} there is no JSON object such as {{"text": "...", ...}}.')
        yield ExampleRow(place, values)


def read_babi(name: str) -> tuple[dict[str, Iterable[ExampleRow]], tuple[str, ...]]:
    """Return the examples of `babi` (all tasks) or `babi:1,2,3` by split, and all their answers.

    Some lists of things are asked for only in the test split. They are answers that a model has no
    example of, not mistakes in the files, and count against it.
    """
    tasks = _babi_tasks(name)
    places = (path for place in candidates(BABI) for path in (place / "en", place))
    folder, files = next(((p, found) for p in places if (found := _babi_files(p))), (None, {}))
    if folder is None:
        raise UserError(
            "bAbI is neither here nor under $DEEPENOUGH_DATA: put its files qa1_..._train.txt "
            "and so on into a folder babi there."
        )
    rows: dict[str, list[ExampleRow]] = {}
    for task in tasks:
        if (task, "train") not in files:
            raise UserError(f"The folder {folder} has no training file of bAbI task {task}.")
        for (number, split), path in files.items():
            if number == task:
                rows.setdefault(split, []).extend(read_stories(path))
    answers = {row.values["label"] for split in rows.values() for row in split}
    return {**rows}, tuple(sorted(answers))


def _babi_tasks(name: str) -> list[int]:
    given = name.partition(":")[2]
    if not given:
        return list(range(1, NUM_BABI_TASKS + 1))
    numbers = [part.strip() for part in given.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= NUM_BABI_TASKS for part in numbers):
        raise UserError(
            f"bAbI has tasks 1 to {NUM_BABI_TASKS}, given as babi:7 or babi:1,2: got {name}."
        )
    return [int(part) for part in numbers]


def _babi_files(folder: Path) -> dict[tuple[int, str], Path]:
    """Return the files of a folder by task and split."""
    if not folder.is_dir():
        return {}
    matches = ((path, _BABI_FILE.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return {(int(m["task"]), m["split"]): path for path, m in matches if m is not None}


def read_stories(path: Path) -> Iterator[ExampleRow]:
    """Yield one row a question of a bAbI file, with the statements of its story before it."""
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
        values = {"text": " ".join(story), "pair": question["question"].strip()}
        values["label"] = question["answer"].strip()
        yield ExampleRow(f"line {number} of {path.name}", values)
