"""Parallel text: pairs of a sentence and its translation, in up to three splits, always streamed.

Pairs come from a folder with files such as `train.en` and `train.de`, from two files of one stem
(`news` for `news.en` and `news.de`), from the same under `$DEEPENOUGH_DATA`, or from a `datasets`
name with a column for each language or one column `translation`. Pairs of which one side is empty
are dropped and counted. Files of different lengths and files that are not UTF-8 are refused, since
a model would learn from misaligned or broken text.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deepenough.config import bounded
from deepenough.data.corpus import (
    SPLIT_NAMES,
    SPLITS,
    candidates,
    check_utf8,
    did_you_mean,
    is_hub_name,
    open_splits,
)
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

HELD_OUT_EVERY = 50
"""Where there is no valid (test) split, one pair in so many is taken out of the training pairs."""


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


Pairs = Callable[[], Iterator[Pair]]


@dataclass
class TranslationDataConfig:
    """Parallel text and batches."""

    source: str = "en"
    """Language to translate from: the ending of its files, or its column."""

    target: str = "de"
    """Language to translate into."""

    test: str | None = None
    """Name of the test files without their ending, where a folder has several; by default the
    first by name."""

    tokenizer: str | None = None
    """A SentencePiece .model file or a folder with a Hugging Face tokenizer; by default one is
    trained on both languages together."""

    vocab_size: int = bounded(8000, ge=1)
    """Vocabulary size of a tokenizer that is trained."""

    lowercase: bool = False
    """Lowercase all text; saved with the tokenizer."""

    max_length: int = bounded(128, ge=2)
    """Most tokens of a sentence: longer pairs are left out of training, longer sources are cut
    when translating."""

    batch_tokens: int = bounded(2048, ge=2)
    """Most tokens of a batch, on the longer side and with padding, over all processes."""

    cache: str | None = None
    """Folder for trained tokenizers; by default $XDG_CACHE_HOME/deepenough or
    ~/.cache/deepenough."""

    def check(self) -> None:
        """Check that a batch holds a sentence and that there are two languages."""
        if self.batch_tokens < self.max_length:
            raise UserError(
                f"A batch of {self.batch_tokens} tokens cannot hold a sentence of "
                f"{self.max_length}: raise dataset.batch_tokens or lower dataset.max_length."
            )
        if self.source == self.target:
            raise UserError(
                f"dataset.source and dataset.target are both {self.source!r}: name two languages."
            )


@dataclass(frozen=True)
class ParallelText:
    """Parallel text by split, always streamed."""

    name: str
    sources: Mapping[str, Pairs]
    """For each split a function that starts its pairs."""
    _warned: set[str] = field(default_factory=set)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self.sources)

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split; a warning counts those dropped for an empty side."""
        if split not in self.sources:
            raise UserError(f"{self.name} has no split {split!r}: it has {', '.join(self.splits)}.")
        num_kept = num_empty = 0
        for pair in self.sources[split]():
            if pair.source.strip() and pair.target.strip():
                num_kept += 1
                yield pair
            else:
                num_empty += 1
        if num_empty and split not in self._warned:
            self._warned.add(split)
            logger.warning(
                "%s, %s: %d of %d pairs have an empty side and were left out.",
                self.name, split, num_empty, num_empty + num_kept,
            )  # fmt: skip
        if not num_kept:
            raise UserError(f"The {split} split of {self.name} holds no pair with text.")


def open_parallel(data: str, dataset: TranslationDataConfig) -> ParallelText:
    """Return the parallel text named `data`; a split that it lacks is held out of the training."""
    languages = (dataset.source, dataset.target)
    sources = None if data.startswith("hf:") else _find_files(data, dataset)
    if sources is None:
        sources = _from_hub(data, languages)
    if dataset.test is not None and not _is_folder(data):
        raise UserError(
            f"{data} is no folder with several test files: leave out test ({dataset.test!r})."
        )
    missing = [split for split in ("valid", "test") if split not in sources]
    if missing:
        train = sources["train"]
        for split in ("train", *missing):
            sources[split] = partial(_held_out, train, split, missing)
    return ParallelText(data, sources)


def _is_folder(data: str) -> bool:
    return not data.startswith("hf:") and any(path.is_dir() for path in candidates(data))


def _find_files(data: str, dataset: TranslationDataConfig) -> dict[str, Pairs] | None:
    for path in candidates(data):
        if path.is_dir():
            return _in_folder(path, dataset)
        files = [path.with_name(f"{path.name}.{lang}") for lang in (dataset.source, dataset.target)]
        if found := [file for file in files if file.is_file()]:
            if len(found) == 1:
                lacking = next(file for file in files if file not in found)
                raise UserError(f"{found[0]} has no counterpart: there is no {lacking}.")
            return {"train": partial(read_pairs, *files)}
    return None


def _in_folder(folder: Path, dataset: TranslationDataConfig) -> dict[str, Pairs]:
    source, target = dataset.source, dataset.target
    stems = [
        {path.name.removesuffix(f".{language}") for path in folder.glob(f"*.{language}")}
        for language in (source, target)
    ]
    both = sorted(stems[0] & stems[1])
    named: dict[str, str] = {}
    for stem in both:
        words = re.split(r"[._-]", stem.lower())
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
        if split is not None:
            named.setdefault(split, stem)
    if dataset.test is not None:
        if dataset.test not in both:
            raise UserError(
                f"{folder} has no pair of files {dataset.test}.{source} and "
                f"{dataset.test}.{target}: it has {', '.join(both) or 'none'}."
            )
        named["test"] = dataset.test
    if "train" not in named:
        raise UserError(
            f"{folder} has no training text: it needs files train.{source} and train.{target}, "
            f"and has {', '.join(both) or 'no such pair'}."
        )
    return {
        split: partial(read_pairs, folder / f"{stem}.{source}", folder / f"{stem}.{target}")
        for split, stem in named.items()
    }


def read_pairs(source: Path, target: Path) -> Iterator[Pair]:
    """Yield the pairs of two files, line by line.

    Raises:
        UserError: The files have different numbers of lines; names both.
    """
    sources, targets = read_strictly(source), read_strictly(target)
    number = 0
    while True:
        pair = (next(sources, None), next(targets, None))
        if pair[0] is None or pair[1] is None:
            break
        number += 1
        yield Pair(pair[0], pair[1])
    counts = [
        number + (side is not None) + sum(1 for _ in rest)
        for side, rest in zip(pair, (sources, targets), strict=True)
    ]
    if counts[0] != counts[1]:
        raise UserError(
            f"{source} has {counts[0]} lines, but {target} has {counts[1]}: a translation must "
            "stand on the line of its sentence."
        )


def read_strictly(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file.

    Raises:
        UserError: A line is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    check_utf8(raw, path)
                    raw = raw.removeprefix(codecs.BOM_UTF8)  # a byte order mark is no text
                try:
                    yield raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path} is not UTF-8 (line {number}): convert it first, for instance "
                        f"with iconv -f LATIN1 -t UTF-8."
                    ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _from_hub(data: str, languages: tuple[str, str]) -> dict[str, Pairs]:
    if not data.startswith("hf:") and not is_hub_name(data):
        raise UserError(
            f"There is no parallel text {data}: give a folder with train.{languages[0]} and "
            f"train.{languages[1]}, or the stem of two such files.{did_you_mean(data)}"
        )
    name, _, config = data.removeprefix("hf:").partition(":")
    found = open_splits(name, config or None, "no folder or pair of files of that name is here")
    return {split: partial(_hub_pairs, rows, languages, name) for split, rows in found.items()}


def _hub_pairs(rows: Any, languages: tuple[str, str], name: str) -> Iterator[Pair]:
    for row in rows:
        texts = row.get("translation", row)
        if not isinstance(texts, dict):
            raise UserError(
                f"The column translation of the dataset {name} does not map languages to text: "
                "give a dataset with a column for each language."
            )
        if lacking := [language for language in languages if language not in texts]:
            raise UserError(
                f"The dataset {name} has no language {lacking[0]!r} but {', '.join(texts)}: set "
                "dataset.source and dataset.target."
            )
        sides = [texts[language] for language in languages]
        # No text is an empty side; a line break would be two lines for everything that follows.
        yield Pair(*("" if side is None else " ".join(str(side).split()) for side in sides))


def _held_out(pairs: Pairs, wanted: str, missing: list[str]) -> Iterator[Pair]:
    num_pairs = num_wanted = 0
    for pair in pairs():
        index = num_pairs % HELD_OUT_EVERY
        num_pairs += 1
        split = missing[index] if index < len(missing) else "train"
        if split == wanted:
            num_wanted += 1
            yield pair
    if num_pairs and not num_wanted:
        raise UserError(
            f"{num_pairs} training pair{'s are' if num_pairs > 1 else ' is'} too few to keep some "
            f"for {' and '.join(missing)}: give such files, or more pairs."
        )
