"""Rows of CSV, TSV and JSONL files, each with the place to look at when something is wrong with it.

A TSV file has no quoting, as GLUE's have none: a quotation mark there is part of a text. CSV files
have it. Both begin with a line of column names; a line of JSONL names its own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepenough.data.text_files import read_lines
from deepenough.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
LONGEST_CELL = 1 << 24


class Row(NamedTuple):
    place: str
    """Such as `row 3 of train.tsv`; rows are counted from 1, the line of names left out."""
    values: Mapping[str, Any]


def read_table(path: Path) -> Iterator[Row]:
    """The rows of a file in order."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _read_jsonl(path)
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, tabs=suffix == ".tsv")
    raise UserError(
        f"{path} is no table of examples: give a file that ends in {', '.join(TABLE_SUFFIXES)}."
    )


def _read_csv(path: Path, tabs: bool) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    options: dict[str, Any] = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    )
    rows = csv.reader((f"{line}\n" for line in read_lines([path])), **options)
    number = 0
    try:
        names = next(rows, None)
        if names is None:
            raise UserError(f"{path} is empty: its first line must name its columns.")
        names = [name.strip() for name in names]
        for cells in rows:
            if not cells:
                continue  # an empty line is no row
            number += 1
            place = f"row {number} of {path.name} (line {rows.line_num})"
            if len(cells) > len(names):
                raise UserError(
                    f"In {place} there are {len(cells)} cells, but the first line names "
                    f"{len(names)} columns: correct one of the two."
                )
            yield Row(place, dict(zip(names, cells, strict=False)))
    except csv.Error as error:
        raise UserError(
            f"{path} is not valid {'TSV' if tabs else 'CSV'} at line {rows.line_num}: {error}."
        ) from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    for line, text in enumerate(read_lines([path]), start=1):
        if not text.strip():
            continue
        number += 1
        place = f"row {number} of {path.name} (line {line})"
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UserError(f"In {place} there is no valid JSON: correct or remove it.") from error
        if not isinstance(values, dict):
            raise UserError(f'In {place} there is no JSON object such as {{"text": "...", ...}}.')
        yield Row(place, values)
