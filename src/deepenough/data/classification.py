"""Texts, or pairs of texts, with labels: from files, from the hub, from bAbI.

A row that cannot be used is refused by its number, before anything is trained: an empty text, a
label that is missing, of another kind than the others, or out of range. Labels are whole numbers
from 0 or names, and what the first one is, the others must be: a word among numbers is a mistake
and would silently become a class of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from deepenough.config import bounded, validate
from deepenough.data.corpus import GOLDEN_RATIO, candidates, group_by_split, open_splits
from deepenough.data.example_files import (
    BABI,
    TABLE_SUFFIXES,
    ExampleRow,
    read_babi,
    read_tables,
)
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

TEXT_COLUMNS = ("text", "sentence", "sentence1", "premise", "question1", "question", "review")
PAIR_COLUMNS = ("pair", "sentence2", "hypothesis", "question2")
LABEL_COLUMNS = ("label", "labels", "class", "target")
LABEL_NAMES = {"sst2": ("negative", "positive")}
"""What the numbers of a known data set mean."""

UNLABELLED = -1
GAPS_PER_LABEL, GAPS_ALLOWED = 2, 8
"""A highest label this far above the number of different ones is a slip of the pen."""


@dataclass
class ClassificationConfig:
    """Examples and batches."""

    text_column: str | None = None
    """Column of the text; by default the first that is called text, sentence, premise, ..."""

    pair_column: str | None = None
    """Column of the second text of a pair; by default one called sentence2, hypothesis, ..., if the
    text's column was not named either."""

    label_column: str | None = None
    """Column of the label; by default label, class or target."""

    num_labels: int | None = bounded(None, ge=1)
    """Number of labels; by default what the training examples have."""

    valid_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the training examples held out for validation where there is no such split."""

    limit: int | None = bounded(None, ge=1)
    """Use only so many training examples."""

    max_length: int = bounded(128, ge=1)
    """Tokens at which texts are cut."""

    batch_size: int = bounded(32, ge=1)
    """Examples in one batch, over all processes."""

    def token_limit(self, model_limit: int | None) -> int:
        """Return where texts are cut: as asked for, but no more than the model can read."""
        return min(self.max_length, model_limit or self.max_length)

    def for_other_data(self) -> ClassificationConfig:
        """Return the same settings for examples that are not trained on: all of them are used."""
        return replace(self, valid_fraction=0.0, limit=None)


class Example(NamedTuple):
    """A text, its second part if it has one, and the number of its label."""

    text: str
    pair: str | None
    label: int


@dataclass(frozen=True)
class LabelledTexts:
    """Examples by split, and the names of their labels."""

    name: str
    splits: Mapping[str, list[Example]]
    labels: tuple[str, ...]

    def split(self, name: str) -> list[Example]:
        """Return the examples of a split; UserError if there is none of that name."""
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise UserError(f"The data {self.name} has no split {name!r}: it has {known}.")
        return self.splits[name]


def open_classification(
    data: str, config: ClassificationConfig, labels: Sequence[str] | None = None
) -> LabelledTexts:
    """Read all examples.

    Args:
        data: File, folder, name under $DEEPENOUGH_DATA, `babi`, or name on the hub.
        config: Columns, number of labels, what to hold out.
        labels: The labels that a model knows, where there is one already.
    """
    validate(config)
    tables, names = _find(data, config)
    splits: dict[str, list[_RawExample]] = {}
    for split, rows in tables.items():
        columns = _Columns(config, needs_label=split != "test")
        read = [columns.read(row) for row in rows]
        if split != "train" and all(_as_number(row.label) == UNLABELLED for row in read):
            logger.warning("The %s split of %s has no labels and is left out.", split, data)
            continue
        splits[split] = read
    if not any(splits.values()):
        raise UserError(f"There are no examples in {data}: give a file with rows.")
    if labels is None:
        found = _find_labels(splits["train"], config.num_labels)
        labels = names if names and len(names) >= len(found) else found
    examples = {
        split: [Example(row.text, row.pair, _label_index(row, labels)) for row in rows]
        for split, rows in splits.items()
    }
    return LabelledTexts(data, _complete(data, examples, config), tuple(labels))


def _complete(
    data: str, examples: dict[str, list[Example]], config: ClassificationConfig
) -> dict[str, list[Example]]:
    """Hold out a validation split if there is none, and keep only `limit` training examples."""
    train = examples["train"]
    if "valid" not in examples and config.valid_fraction > 0:
        # Multiples of the golden ratio fill the unit interval evenly, whatever the order of labels.
        places = [(number + 1) * GOLDEN_RATIO % 1.0 for number in range(len(train))]
        held = [place < config.valid_fraction for place in places]
        valid = [example for example, out in zip(train, held, strict=True) if out]
        if valid:
            examples = examples | {"valid": valid}
            train = [example for example, out in zip(train, held, strict=True) if not out]
    if not train:
        raise UserError(
            f"No training example of {data} is left when {config.valid_fraction:g} of them are "
            "held out: give more, or lower dataset.valid_fraction."
        )
    return examples | {"train": train[: config.limit]}


# -- where examples come from ----------------------------------------------------------------------

_Tables = tuple[dict[str, Iterable[ExampleRow]], tuple[str, ...] | None]


def _find(data: str, config: ClassificationConfig) -> _Tables:
    """Return the rows of every split, and the names of all labels where the source tells them."""
    if data == BABI or data.startswith(f"{BABI}:"):
        return read_babi(data)
    if data.startswith("hf:"):
        return _hub_rows(data.removeprefix("hf:"), config)
    names = LABEL_NAMES.get(Path(data).name)
    for candidate in candidates(data):
        if candidate.is_file():
            return {"train": read_tables([candidate])}, names
        if candidate.is_dir():
            paths = sorted(p for p in candidate.iterdir() if p.suffix.lower() in TABLE_SUFFIXES)
            if not paths:
                raise UserError(
                    f"The folder {candidate} holds no {', '.join(TABLE_SUFFIXES)} file: name a "
                    "file or another folder."
                )
            groups = group_by_split(paths)
            return {split: read_tables(files) for split, files in groups.items()}, names
    if re.fullmatch(r"[\w-]+/[\w.-]+(:[\w.-]+)?", data) and Path(data).suffix not in TABLE_SUFFIXES:
        return _hub_rows(data, config)
    raise UserError(
        f"There is no file or folder {data}, here or under $DEEPENOUGH_DATA: check the name, set "
        f"the variable, or give hf:{data} for the hub."
    )


def _hub_rows(name: str, config: ClassificationConfig) -> _Tables:
    repository, _, part = name.partition(":")
    splits = open_splits(repository, part or None, "there is no such file or folder")
    features: Any = getattr(splits["train"], "features", None) or {}
    label = config.label_column or next((c for c in LABEL_COLUMNS if c in features), "")
    names = getattr(features.get(label), "names", None)
    tables = {split: _numbered(split, rows) for split, rows in splits.items()}
    return tables, tuple(names) if names else None


def _numbered(split: str, rows: Iterable[Mapping[str, Any]]) -> Iterable[ExampleRow]:
    for number, row in enumerate(rows, start=1):
        yield ExampleRow(f"row {number} of the {split} split", row)


# -- columns ---------------------------------------------------------------------------------------


class _RawExample(NamedTuple):
    """An example with its label as it stands in its file, and where that is."""

    place: str
    text: str
    pair: str | None
    label: Any


class _Columns:
    """Where a table keeps what is needed; names left open are found in its first row."""

    def __init__(self, config: ClassificationConfig, needs_label: bool) -> None:
        """Choose nothing yet; the labels of a test split may be secret (`needs_label`)."""
        self.text, self.pair = config.text_column, config.pair_column
        self.label, self.needs_label = config.label_column, needs_label
        self.chosen = False

    def read(self, row: ExampleRow) -> _RawExample:
        if not self.chosen:
            self._choose(list(row.values))
        text = self._text(row, str(self.text))
        pair = self._text(row, self.pair) if self.pair is not None else None
        label = UNLABELLED if self.label is None else row.values.get(self.label)
        return _RawExample(row.place, text, pair, label)

    def _choose(self, here: list[str]) -> None:
        if self.text is None and self.pair is None:
            self.pair = next((name for name in PAIR_COLUMNS if name in here), None)
        self.text = _column("text", self.text, TEXT_COLUMNS, here)
        usual = LABEL_COLUMNS if self.label is None else (self.label,)
        has_label = self.needs_label or any(name in here for name in usual)
        self.label = _column("label", self.label, LABEL_COLUMNS, here) if has_label else None
        if self.pair is not None:
            _column("pair", self.pair, (), here)
        self.chosen = True

    @staticmethod
    def _text(row: ExampleRow, column: str) -> str:
        value = row.values.get(column)
        if value is None or not str(value).strip():
            raise UserError(
                f"The text in column {column!r} is empty in {row.place}: fill it or remove the row."
            )
        # A lone half of a character, which JSON allows, is none for a tokenizer.
        return str(value).strip().encode("utf-8", "replace").decode("utf-8")


def _column(role: str, given: str | None, usual: Iterable[str], here: list[str]) -> str:
    """Return the name of a column among those `here`, the one given or the first usual one."""
    wanted = [given] if given is not None else list(usual)
    found = next((name for name in wanted if name in here), None)
    if found is None:
        looked = repr(given) if given is not None else f"called {', '.join(wanted)}"
        raise UserError(
            f"There is no {role} column {looked} among {', '.join(here)}: "
            f"name it with --dataset.{role}_column."
        )
    return found


# -- labels ----------------------------------------------------------------------------------------


def _find_labels(rows: Sequence[_RawExample], num_labels: int | None) -> tuple[str, ...]:
    """Return the names of all labels of a training set.

    Numbers are named by their digits, and there are as many as the highest one asks for.
    """
    if not rows:
        raise UserError("There are no training examples: give a file with at least one row.")
    if _as_number(rows[0].label) is None:
        names = sorted({_label_name(row) for row in rows})
        num_found = len(names)
    else:
        numbers = [_label_number(row) for row in rows]
        highest, num_found = max(numbers), len(set(numbers))
        if num_labels is None and highest > GAPS_PER_LABEL * num_found + GAPS_ALLOWED:
            raise UserError(
                f"The label {highest} in {rows[numbers.index(highest)].place} is far above the "
                f"number of different labels, {num_found}: correct it, or give dataset.num_labels."
            )
        names = [str(number) for number in range(num_labels or highest + 1)]
    if num_labels is not None and len(names) != num_labels:
        raise UserError(
            f"dataset.num_labels is {num_labels}, but the training examples have {len(names)} "
            "labels."
        )
    if num_found < 2:
        raise UserError("All training examples have the same label: there is nothing to learn.")
    return tuple(names)


def _label_index(row: _RawExample, names: Sequence[str]) -> int:
    """Return the number of a label; UserError, naming the place, if it is none of the names."""
    value = _present(row)
    if isinstance(value, str) and value.strip() in names:
        return list(names).index(value.strip())
    if _as_number(value) is None and any(_as_number(name) is None for name in names):
        shown = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise UserError(f"The label {value!r} in {row.place} is none of those known: {shown}.")
    number = _label_number(row)
    if number >= len(names):
        raise UserError(
            f"The label {number} in {row.place} is out of range: labels go from 0 to "
            f"{len(names) - 1}."
        )
    return number


def _label_number(row: _RawExample) -> int:
    number = _as_number(_present(row))
    if number is None:
        raise UserError(
            f"The label {row.label!r} in {row.place} is not a whole number: labels are either all "
            "whole numbers from 0 or all names."
        )
    if number < 0:
        raise UserError(f"The label {number} in {row.place} is out of range: labels begin with 0.")
    return number


def _label_name(row: _RawExample) -> str:
    name = str(_present(row)).strip()
    try:
        float(name)
    except ValueError:
        return name
    _label_number(row)  # refuses one that is not whole
    raise UserError(
        f"The label {row.label!r} in {row.place} is a number, while the first one is a name: "
        "labels are either all whole numbers from 0 or all names."
    )


def _present(row: _RawExample) -> Any:
    if row.label is None or (isinstance(row.label, str) and not row.label.strip()):
        raise UserError(f"The label is missing in {row.place}: add it or remove the row.")
    return row.label


def _as_number(value: Any) -> int | None:
    """Return a whole number however it is written, or None."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return int(str(value).strip())
    except ValueError:
        return None
