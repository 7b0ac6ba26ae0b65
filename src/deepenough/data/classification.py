"""Texts, or pairs of texts, with labels: from files, from the hub, from bAbI.

A row that cannot be used is refused by its number, before anything is trained: an empty text, a
label that is missing, of another kind than the others, or out of range. Labels are whole numbers
from 0 or names, and what the first one is, the others must be: a word among numbers is a mistake
and would silently become a class of its own.

CSV and TSV files are read by `pandas.read_csv`, which `datasets` reads them with. It is called
here, because `datasets.load_dataset` guesses types (007 becomes 7) unless it is told all columns
beforehand. Of JSONL `datasets` turns columns of dates into timestamps and refuses a text that ends
in half an emoji, so each line is read by `json`. A TSV file has no quoting, as GLUE's have none.
"""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepenough.config import validate
from deepenough.data.config import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassificationConfig,
    ProblemType,
)
from deepenough.data.corpus import (
    MAX_LINE_BYTES,
    candidates,
    did_you_mean,
    group_by_split,
    is_hub_name,
    open_splits,
    read_rows,
    split_of,
)
from deepenough.data.tasks import BABI, COLA_COLUMNS, HUB, TASKS, GlueTask, glue_task, read_babi
from deepenough.devices import to_device
from deepenough.errors import UserError
from deepenough.training.logging import announce_split

logger = logging.getLogger("deepenough")

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
TEXT_COLUMNS = ("text", "sentence", "sentence1", "premise", "question1", "question", "review")
PAIR_COLUMNS = ("pair", "sentence2", "hypothesis", "question2")
LABEL_COLUMNS = ("label", "labels", "class", "target")
METRICS = {
    SINGLE_LABEL: ("accuracy",),
    MULTI_LABEL: ("f1", "accuracy"),
    REGRESSION: ("pearson", "spearman"),
}
"""How answers are scored where the data does not say: the first counts most."""

UNLABELLED = "-1"
LABEL_END = "\x1f"
"""Follows each of several labels that were given as a list."""
MAX_COLUMNS = 10_000
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
GAPS_PER_LABEL, GAPS_ALLOWED = 2, 8
"""A highest label this far above the number of different ones is a slip of the pen."""


Label = int | float | tuple[float, ...]
"""The number of a label, a value to predict, or for every label whether it holds."""


class Example(NamedTuple):
    """A text, its second part if it has one, and its label."""

    text: str
    pair: str | None
    label: Label


@dataclass(frozen=True)
class LabelledTexts:
    """Examples by split, and the names of their labels."""

    name: str
    splits: Mapping[str, list[Example]]
    labels: tuple[str, ...]
    problem: ProblemType = SINGLE_LABEL
    metrics: tuple[str, ...] = METRICS[SINGLE_LABEL]

    def split(self, name: str) -> list[Example]:
        """Return the examples of a split; UserError if there is none of that name."""
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise UserError(f"The data {self.name} has no split {name!r}: it has {known}.")
        return self.splits[name]


def open_classification(
    data: str, config: ClassificationConfig, labels: Sequence[str] | None = None
) -> LabelledTexts:
    """Read all examples of a file, folder, name under $DEEPENOUGH_DATA or on the hub, or task.

    `labels` are those that a model knows, where there is one already.
    """
    validate(config)
    task = None if Path(data).suffix.lower() in TABLE_SUFFIXES else glue_task(data)
    tables, names = _find(data, config, task)
    problem = config.problem_type or (task.problem if task else SINGLE_LABEL)
    splits: dict[str, list[_RawExample]] = {}
    for split, rows in tables.items():
        read = list(_raw_examples(rows, config, not split.startswith("test"), task))
        if split != "train" and all(row.label == UNLABELLED for row in read):
            logger.warning("The %s split of %s has no labels and is left out.", split, data)
            continue
        splits[split] = read
    if not any(splits.values()):
        raise UserError(f"There are no examples in {data}: give a file with rows.")
    if problem == REGRESSION:
        labels = labels or (task.labels if task and task.problem == REGRESSION else ("value",))
    elif labels is None:
        found = _label_names([one for row in splits["train"] for one in _each_label(row, problem)])
        known = set(names or ()).issuperset(found) or found[0].isdigit()
        labels = names if names and known and len(names) >= len(found) else found
    examples = {
        split: [Example(row.text, row.pair, _label(row, labels, problem)) for row in rows]
        for split, rows in splits.items()
    }
    if "valid" not in examples and config.valid_fraction > 0:
        parts: dict[str, list[Example]] = {"train": [], "valid": []}
        for number, example in enumerate(examples["train"]):
            parts[split_of(number, {"valid": config.valid_fraction})].append(example)
        examples |= {split: part for split, part in parts.items() if part or split == "train"}
        announce_split("valid", f"{len(parts['valid'])} examples", data)
    if not examples["train"]:
        raise UserError(
            f"No training example of {data} is left when {config.valid_fraction:g} of them are "
            "held out: give more, or lower dataset.valid_fraction."
        )
    examples["train"] = examples["train"][: config.limit]
    metrics = task.metrics if task and task.problem == problem else METRICS[problem]
    return LabelledTexts(data, examples, tuple(labels), problem, metrics)


# -- where examples come from ----------------------------------------------------------------------

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, such as `row 3 of train.tsv`, counted from 1, and its values by column."""


def _find(
    data: str, config: ClassificationConfig, task: GlueTask | None
) -> tuple[dict[str, Iterator[Row]], tuple[str, ...] | None]:
    """Return the rows of every split, and the names of all labels where the source tells them."""
    if data == BABI or data.startswith(f"{BABI}:"):
        return read_babi(data)
    places = task.places(data) if task else candidates(data)
    for candidate in [] if data.startswith("hf:") else places:
        paths = [candidate] if candidate.is_file() else []
        if candidate.is_dir():
            paths = sorted(p for p in candidate.iterdir() if p.suffix.lower() in TABLE_SUFFIXES)
            if not paths:
                raise UserError(
                    f"The folder {candidate} holds no {', '.join(TABLE_SUFFIXES)} file: name a "
                    "file or another folder."
                )
        if paths:
            tables = {split: read_tables(files) for split, files in group_by_split(paths).items()}
            return tables, task.labels if task else None
    if data in TASKS:
        data = f"hf:{HUB}:{data}"
    if not data.startswith("hf:") and (not is_hub_name(data) or data.endswith(TABLE_SUFFIXES)):
        raise UserError(
            f"There is no file or folder {data}, here or under $DEEPENOUGH_DATA: check the name, "
            f"set the variable, or give hf:{data} for the hub.{did_you_mean(data)}"
        )
    repository, _, part = data.removeprefix("hf:").partition(":")
    splits = open_splits(repository, part or None)
    features: Any = getattr(splits["train"], "features", None) or {}
    label = config.label_column or next((c for c in LABEL_COLUMNS if c in features), "")
    of_list = getattr(features.get(label), "feature", features.get(label))
    names = getattr(of_list, "names", None)
    tables = {split: _numbered(rows, f"the {split} split") for split, rows in splits.items()}
    return tables, tuple(names) if names else None


def read_tables(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of CSV, TSV and JSONL files in order."""
    for path in paths:
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise UserError(
                f"{path} is no table of examples: give a file that ends in "
                f"{', '.join(TABLE_SUFFIXES)}."
            )
        read = read_rows if path.suffix.lower() == ".jsonl" else _read_csv
        yield from _numbered(read(path), path.name)


def _numbered(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield f"row {number} of {source}", row


def _read_csv(path: Path) -> list[dict[str, str]]:
    import pandas  # here, because most commands do not need it

    tabs = path.suffix.lower() == ".tsv"
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
        if first.count(b"\t" if tabs else b",") > MAX_COLUMNS:  # for which pandas takes minutes
            raise UserError(f"{path} has more than {MAX_COLUMNS:,} columns: keep texts and labels.")
        # CoLA's files begin with their first row: where it is from, and whether it is acceptable.
        is_cola = tabs and re.match(rb"[^\t]+\t[01]\t\*?\t[^\t]+$", first.strip()) is not None
        table = pandas.read_csv(
            path,
            names=COLA_COLUMNS if is_cola else None,
            sep="\t" if tabs else ",",
            quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
        )
    except pandas.errors.EmptyDataError as error:
        raise UserError(f"{path} is empty: its first line must name its columns.") from error
    except (OSError, ValueError) as error:  # the parser's and the decoder's are ValueErrors
        kind = path.suffix[1:].upper()
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        raise UserError(
            f"{path} could not be read as UTF-8 {kind} ({reason}): correct it, or give another."
        ) from error
    if not isinstance(table.index, pandas.RangeIndex):  # pandas takes the first cells for names
        raise UserError(
            f"{path} has more cells in its rows than its first line names columns: correct it."
        )
    return table.rename(columns=str.strip).to_dict("records")


# -- columns and labels ----------------------------------------------------------------------------


class _RawExample(NamedTuple):
    """An example with its label as it stands in its file, and where that is."""

    place: str
    text: str
    pair: str | None
    label: str


def _raw_examples(
    rows: Iterable[Row],
    config: ClassificationConfig,
    needs_label: bool,
    task: GlueTask | None = None,
) -> Iterator[_RawExample]:
    """Yield the examples of a table; names of columns left open are found in its first row.

    The labels of a test split may be secret: `needs_label` is False for one.
    """
    text, pair, label = config.text_column, config.pair_column, config.label_column
    several = config.problem_type == MULTI_LABEL
    for number, (place, values) in enumerate(rows):
        if number == 0:
            own = task.columns(values) if task and text is pair is label is None else None
            if own is not None:
                text, pair, label = own
            elif text is None and pair is None:
                pair = next((name for name in PAIR_COLUMNS if name in values), None)
            text = _column("text", text, TEXT_COLUMNS, values)
            usual = LABEL_COLUMNS if label is None else (label,)
            has_label = needs_label or any(name in values for name in usual)
            label = _column("label", label, LABEL_COLUMNS, values) if has_label else None
            if pair is not None:
                _column("pair", pair, (), values)
        yield _RawExample(
            place,
            _text_in(values, str(text), place),
            None if pair is None else _text_in(values, pair, place),
            UNLABELLED if label is None else _label_text(values, label, place, several),
        )


def _column(role: str, given: str | None, usual: Iterable[str], here: Iterable[str]) -> str:
    """Return the name of a column among those `here`, the one given or the first usual one."""
    wanted = [given] if given is not None else list(usual)
    found = next((name for name in wanted if name in here), None)
    if found is None:
        looked = repr(given) if given is not None else f"called {', '.join(wanted)}"
        raise UserError(
            f"There is no {role} column {looked} among {', '.join(here):.200}: "
            f"name it with --dataset.{role}_column."
        )
    return found


def _cell(values: Mapping[str, Any], column: str, place: str) -> Any:
    value = values.get(column)
    if isinstance(value, list | dict) or value != value:
        raise UserError(f"Column {column!r} of {place} holds neither text nor a number: mend it.")
    return value


def _text_in(values: Mapping[str, Any], column: str, place: str) -> str:
    value = _cell(values, column, place)
    if value is None or not str(value).strip():
        raise UserError(
            f"The text in column {column!r} is empty in {place}: fill it or remove the row."
        )
    # A lone half of a character, which JSON allows, is none for a tokenizer.
    return str(value).strip().encode("utf-8", "replace").decode("utf-8")


def _label_text(values: Mapping[str, Any], column: str, place: str, several: bool = False) -> str:
    """Return a label as it would stand in a CSV file, empty if there is none."""
    if several and isinstance(listed := values.get(column), list):
        parts = [_label_text({column: part}, column, place) for part in listed]
        return "".join(f"{part}{LABEL_END}" for part in parts)
    value = _cell(values, column, place)
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    return "" if value is None else str(value).strip()


def _label_names(rows: Sequence[_RawExample]) -> tuple[str, ...]:
    """Return the names of all labels of a training set.

    Numbers are named by their digits, and there are as many as the highest one asks for.
    """
    if not rows:
        raise UserError("There are no training examples: give a file with at least one row.")
    numeric = bool(_NUMBER.fullmatch(rows[0].label))
    for row in rows:
        _check_present(row)
        is_wrong = not _WHOLE.fullmatch(row.label) if numeric else _NUMBER.fullmatch(row.label)
        if is_wrong:
            kind = "is not a whole number" if numeric else "is a number, but the first is a name"
            raise UserError(
                f"The label {row.label!r:.60} in {row.place} {kind}: make labels all whole "
                "numbers from 0 or all names."
            )
    names = sorted({row.label for row in rows})
    num_found = len(names)
    if numeric:
        highest = max(rows, key=lambda row: int(row.label))
        if int(highest.label) > GAPS_PER_LABEL * num_found + GAPS_ALLOWED:
            raise UserError(
                f"The label {highest.label:.60} in {highest.place} is far above the number of "
                f"different labels, {num_found}: correct it, or number the labels without gaps."
            )
        names = [str(number) for number in range(int(highest.label) + 1)]
    if num_found < 2:
        raise UserError("All training examples have the same label: there is nothing to learn.")
    return tuple(names)


def _each_label(row: _RawExample, problem: ProblemType) -> list[_RawExample]:
    """Return an example once for every label that it has."""
    if problem != MULTI_LABEL:
        return [row]
    end = LABEL_END if LABEL_END in row.label else ","
    parts = [part.strip() for part in row.label.removesuffix(end).split(end)]
    return [row._replace(label=part) for part in parts if part]


def _label(row: _RawExample, names: Sequence[str], problem: ProblemType) -> Label:
    """Return what a model is to answer; UserError, naming the place, if that is none."""
    if problem == SINGLE_LABEL:
        return _label_index(row, names)
    if problem == MULTI_LABEL:
        held = {_label_index(one, names) for one in _each_label(row, problem)}
        return tuple(float(number in held) for number in range(len(names)))
    _check_present(row)
    try:
        value = float(row.label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"The label {row.label!r:.60} in {row.place} is no number: correct it.")
    return value


def _label_index(row: _RawExample, names: Sequence[str]) -> int:
    """Return the number of a label; UserError, naming the place, if it is none of the names."""
    _check_present(row)
    if row.label in names:
        return names.index(row.label)
    if not _WHOLE.fullmatch(row.label):
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise UserError(
            f"The label {row.label!r:.60} in {row.place} is none of those known: {shown}."
        )
    if not 0 <= int(row.label) < len(names):
        raise UserError(
            f"The label {row.label:.60} in {row.place} is out of range: labels go from 0 to "
            f"{len(names) - 1}."
        )
    return int(row.label)


def _check_present(row: _RawExample) -> None:
    if not row.label:
        raise UserError(f"The label is missing in {row.place}: add it or remove the row.")


# -- token ids -------------------------------------------------------------------------------------


class EncodedExamples:
    """Examples as token ids, texts longer than `max_length` tokens cut."""

    def __init__(
        self, examples: Sequence[Example], tokenizer: Any, max_length: int, name: str = "given"
    ) -> None:
        self.tokenizer = tokenizer
        self.labels = [example.label for example in examples]
        texts = [example.text for example in examples]
        has_pairs = any(example.pair is not None for example in examples)
        pairs = [example.pair or "" for example in examples] if has_pairs else None
        how = {"truncation": True, "max_length": max_length, "verbose": False}
        # Asked for: ALBERT's tokenizer does not tell the texts of a pair apart by itself.
        encoded = tokenizer(texts, pairs, return_token_type_ids=has_pairs or None, **how)
        # Not the masks, which are all ones before there is padding.
        self.columns: dict[str, list[list[int]]] = {
            key: encoded[key] for key in ("input_ids", "token_type_ids") if key in encoded
        }
        self.lengths = [len(ids) for ids in self.columns["input_ids"]]
        num_full = sum(length == max_length for length in self.lengths)
        if num_full:
            said = "%d of %d %s texts fill or exceed %d tokens and may be cut."
            logger.info(said, num_full, len(texts), name, max_length)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return a model's arguments for these examples: ids, mask, types, labels."""
        features = {key: [values[row] for row in rows] for key, values in self.columns.items()}
        features["attention_mask"] = [[1] * self.lengths[row] for row in rows]
        padded: Any = self.tokenizer.pad(features, return_tensors="pt")
        result: dict[str, Tensor] = dict(padded)
        result["labels"] = torch.tensor([self.labels[row] for row in rows])
        return {key: to_device(value, device) for key, value in result.items()}
