"""Texts, or pairs of texts, with labels: from files, from the hub, from bAbI.

A row that cannot be used is refused by its number, before anything is trained: an empty text, a
label that is missing, of another kind than the others, or out of range.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from deepenough.data.babi import BABI, read_babi
from deepenough.data.corpus import GOLDEN_RATIO, candidates, open_splits
from deepenough.data.labels import as_number, find_labels, label_number
from deepenough.data.table_rows import TABLE_SUFFIXES, Row, read_table
from deepenough.data.text_files import group_by_split
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

TEXT_COLUMNS = ("text", "sentence", "sentence1", "premise", "question1", "question", "review")
PAIR_COLUMNS = ("pair", "sentence2", "hypothesis", "question2")
LABEL_COLUMNS = ("label", "labels", "class", "target")
#: What the numbers of a known data set mean.
LABEL_NAMES = {"sst2": ("negative", "positive")}
UNLABELLED = -1


class Example(NamedTuple):
    text: str
    pair: str | None
    label: int


@dataclass
class ClassificationData:
    """Examples and batches"""

    dataset: str = "sst2"
    """Examples: a CSV, TSV or JSONL file, a folder of such files named train, dev and test, a
    folder of $DEEPENOUGH_DATA (sst2), bAbI (`babi`, one task as `babi:7`), or a `datasets` name
    (`hf:name`, `hf:name:config`)."""

    text_column: str | None = None
    """Column of the text; by default the first that is called text, sentence, premise, ..."""

    pair_column: str | None = None
    """Column of the second text of a pair; by default one called sentence2, hypothesis, ..., if the
    text's column was not named either."""

    label_column: str | None = None
    """Column of the label; by default label, class or target."""

    num_labels: int | None = None
    """Number of labels; by default what the training examples have."""

    valid_fraction: float = 0.05
    """Share of the training examples held out for validation where there is no such split."""

    limit: int | None = None
    """Use only so many training examples."""

    max_length: int = 128
    """Tokens at which texts are cut."""

    batch_size: int = 32
    """Examples in one batch, over all processes."""

    def check(self) -> None:
        for name in ("num_labels", "limit", "max_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name} must be at least 1: got {value}.")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction must be in [0, 1): got {self.valid_fraction}.")


@dataclass(frozen=True)
class LabelledTexts:
    """Examples by split, and the names of their labels."""

    name: str
    splits: Mapping[str, list[Example]]
    labels: tuple[str, ...]

    def split(self, name: str) -> list[Example]:
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise UserError(f"The data {self.name} has no split {name!r}: it has {known}.")
        return self.splits[name]


def open_classification(
    data: ClassificationData, labels: Sequence[str] | None = None
) -> LabelledTexts:
    """All examples; `labels` are those a model knows, where there is one already."""
    data.check()
    tables, names = _find(data)
    splits: dict[str, list[tuple[str, str, str | None, Any]]] = {}
    for split, rows in tables.items():
        columns = Columns.choose(data, needs_label=split != "test")
        read = [columns.read(row) for row in rows]
        if split != "train" and all(as_number(raw) == UNLABELLED for *_, raw in read):
            logger.warning("The %s split of %s has no labels: passed over.", split, data.dataset)
            continue
        splits[split] = read
    if not any(splits.values()):
        raise UserError(f"There are no examples in {data.dataset}: give a file with rows.")
    if labels is None:
        raw = [(place, raw) for place, _, _, raw in splits["train"]]
        found = find_labels(raw, data.num_labels)
        labels = names if names and len(names) >= len(found) else found
    examples = {
        split: [Example(text, pair, label_number(raw, at, labels)) for at, text, pair, raw in rows]
        for split, rows in splits.items()
    }
    return LabelledTexts(data.dataset, _complete(examples, data), tuple(labels))


@dataclass
class Columns:
    """Where a table keeps what is needed; names left open are found in its first row."""

    text: str | None
    pair: str | None
    label: str | None
    needs_label: bool
    """Those of a test split may be secret."""
    chosen: bool = False

    @classmethod
    def choose(cls, data: ClassificationData, needs_label: bool) -> Columns:
        return cls(data.text_column, data.pair_column, data.label_column, needs_label)

    def read(self, row: Row) -> tuple[str, str, str | None, Any]:
        """Place, text, pair and label as it stands there."""
        if not self.chosen:
            self._find(row)
        assert self.text is not None
        text = self._text(row, self.text)
        pair = self._text(row, self.pair) if self.pair is not None else None
        return (
            row.place,
            text,
            pair,
            UNLABELLED if self.label is None else row.values.get(self.label),
        )

    def _find(self, row: Row) -> None:
        here = list(row.values)
        if self.text is None and self.pair is None:
            self.pair = next((name for name in PAIR_COLUMNS if name in here), None)
        self.text = self._column("text", self.text, TEXT_COLUMNS, here)
        usual = LABEL_COLUMNS if self.label is None else (self.label,)
        if self.needs_label or any(name in here for name in usual):
            self.label = self._column("label", self.label, LABEL_COLUMNS, here)
        else:
            self.label = None
        if self.pair is not None:
            self._column("pair", self.pair, (), here)
        self.chosen = True

    @staticmethod
    def _column(role: str, given: str | None, usual: Iterable[str], here: list[str]) -> str:
        wanted = [given] if given is not None else list(usual)
        found = next((name for name in wanted if name in here), None)
        if found is None:
            looked = repr(given) if given is not None else f"called {', '.join(wanted)}"
            raise UserError(
                f"There is no {role} column {looked} among {', '.join(here)}: "
                f"name it with --data.{role}_column."
            )
        return found

    @staticmethod
    def _text(row: Row, column: str) -> str:
        value = row.values.get(column)
        if value is None or not str(value).strip():
            raise UserError(
                f"The text in column {column!r} is empty in {row.place}: fill it or remove the row."
            )
        # A lone half of a character, which JSON allows, is none for a tokenizer.
        return str(value).strip().encode("utf-8", "replace").decode("utf-8")


def _find(
    data: ClassificationData,
) -> tuple[dict[str, Iterable[Row]], tuple[str, ...] | None]:
    """The rows of every split, and the names of all labels where the source tells them."""
    name = data.dataset
    if name.startswith("hf:"):
        return _hub_rows(name.removeprefix("hf:"), data)
    if name == BABI or name.startswith(f"{BABI}:"):
        return read_babi(name)
    names = LABEL_NAMES.get(Path(name).name)
    for candidate in candidates(name):
        if candidate.is_file():
            return {"train": read_table(candidate)}, names
        if candidate.is_dir():
            paths = sorted(p for p in candidate.iterdir() if p.suffix.lower() in TABLE_SUFFIXES)
            if not paths:
                raise UserError(
                    f"The folder {candidate} holds no {', '.join(TABLE_SUFFIXES)} file: name a "
                    "file or another folder."
                )
            groups = group_by_split(paths)
            return {split: _all_rows(files) for split, files in groups.items()}, names
    raise UserError(
        f"There is no file or folder {name}, here or under $DEEPENOUGH_DATA: check the name, set "
        f"the variable, or give hf:{name} for the hub."
    )


def _all_rows(paths: Sequence[Path]) -> Iterable[Row]:
    for path in paths:
        yield from read_table(path)


def _hub_rows(
    name: str, data: ClassificationData
) -> tuple[dict[str, Iterable[Row]], tuple[str, ...] | None]:
    repository, _, config = name.partition(":")
    splits = open_splits(repository, config or None, "hf: means the hub alone")
    features: Any = getattr(splits["train"], "features", None) or {}
    label = data.label_column or next((c for c in LABEL_COLUMNS if c in features), "")
    names = getattr(features.get(label), "names", None)
    tables = {split: _numbered(split, rows) for split, rows in splits.items()}
    return tables, tuple(names) if names else None


def _numbered(split: str, rows: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    for number, row in enumerate(rows, start=1):
        yield Row(f"row {number} of the {split} split", row)


def _complete(
    examples: dict[str, list[Example]], data: ClassificationData
) -> dict[str, list[Example]]:
    """With a validation split, and no more training examples than asked for."""
    train = examples["train"]
    if "valid" not in examples and data.valid_fraction > 0:
        # Multiples of the golden ratio fill the unit interval evenly, whatever the order of labels.
        places = [(number + 1) * GOLDEN_RATIO % 1.0 for number in range(len(train))]
        held = [place < data.valid_fraction for place in places]
        valid = [example for example, out in zip(train, held, strict=True) if out]
        if valid:
            examples = examples | {"valid": valid}
            train = [example for example, out in zip(train, held, strict=True) if not out]
    if not train:
        raise UserError(
            f"No training example of {data.dataset} is left when {data.valid_fraction:g} of them "
            "are held out: give more, or lower data.valid_fraction."
        )
    return examples | {"train": train[: data.limit]}


def with_dataset(data: ClassificationData, dataset: str) -> ClassificationData:
    """The same settings for other examples, such as those to measure a trained model on."""
    return replace(data, dataset=dataset, valid_fraction=0.0, limit=None)
