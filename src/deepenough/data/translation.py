"""Parallel text: pairs of a sentence and its translation, streamed, and as token ids.

Pairs come from a folder with files such as `train.en` and `train.de`, here or under
`$DEEPENOUGH_DATA`, or from a `datasets` name with a column for each language or one column
`translation`. Pairs of which one side is empty are dropped and counted. Files of different lengths
and files that are not UTF-8 are refused: a model would learn from misaligned or broken text.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepenough.artifacts import key_of
from deepenough.data.config import TranslationDataConfig
from deepenough.data.corpus import (
    SPLITS,
    candidates,
    did_you_mean,
    is_hub_name,
    named_split,
    open_splits,
    read_lines,
)
from deepenough.data.encoding import encoder_of
from deepenough.data.tokenizer import cached_tokenizer, load_tokenizer
from deepenough.devices import to_device
from deepenough.errors import UserError
from deepenough.training.logging import announce_split

logger = logging.getLogger("deepenough")

HELD_OUT_EVERY = 50
"""Where there is no valid (test) split, one pair in so many is taken out of the training pairs."""
CHUNK = 10_000
"""Pairs that are encoded at a time."""
IGNORE_INDEX = -100
"""Target of a position that is not to be predicted."""


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


Pairs = Callable[[], Iterator[Pair]]


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
            said = "%s, %s: %d of %d pairs have an empty side and were left out."
            logger.warning(said, self.name, split, num_empty, num_empty + num_kept)
        if not num_kept:
            raise UserError(
                f"The {split} split of {self.name} holds no pair with text: give such files, or "
                "more training pairs to take some from."
            )


def open_parallel(data: str, dataset: TranslationDataConfig) -> ParallelText:
    """Return the parallel text named `data`; a split that it lacks is held out of the training."""
    places = [] if data.startswith("hf:") else candidates(data)
    folder = next((place for place in places if place.is_dir()), None)
    sources = _from_hub(data, dataset) if folder is None else _in_folder(folder, dataset)
    missing = [split for split in ("valid", "test") if split not in sources]
    if missing:
        train = sources["train"]
        for split in ("train", *missing):
            sources[split] = partial(_held_out, train, split, missing)
    for split in missing:
        announce_split(split, f"one in {HELD_OUT_EVERY} pairs", data)
    return ParallelText(data, sources)


def _in_folder(folder: Path, dataset: TranslationDataConfig) -> dict[str, Pairs]:
    source, target = dataset.source, dataset.target
    stems = [
        {path.name.removesuffix(f".{language}") for path in folder.glob(f"*.{language}")}
        for language in (source, target)
    ]
    both = sorted(stems[0] & stems[1])
    # Of several files for a split the first by name.
    named = {split: stem for stem in reversed(both) if (split := named_split(stem))}
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
    """Yield the pairs of two files, line by line; UserError if one has more lines or no UTF-8."""
    sides = [read_lines([path]) for path in (source, target)]
    for number, (one, other) in enumerate(zip_longest(*sides)):
        if one is None or other is None:
            shorter, longer = (source, target) if one is None else (target, source)
            raise UserError(
                f"{shorter} has {number} lines, but {longer} has more: a translation must stand on "
                "the line of its sentence."
            )
        yield Pair(one, other)


def _from_hub(data: str, dataset: TranslationDataConfig) -> dict[str, Pairs]:
    languages = (dataset.source, dataset.target)
    if not data.startswith("hf:") and not is_hub_name(data):
        raise UserError(
            f"There is no folder {data}, here or under $DEEPENOUGH_DATA: give one with "
            f"train.{languages[0]} and train.{languages[1]}, or hf:{data} for the hub."
            f"{did_you_mean(data)}"
        )
    if dataset.test is not None:
        raise UserError(
            f"{data} is no folder with several test files: leave out test ({dataset.test!r})."
        )
    name, _, config = data.removeprefix("hf:").partition(":")
    found = open_splits(name, config or None)
    return {split: partial(_hub_pairs, rows, languages, name) for split, rows in found.items()}


def _hub_pairs(rows: Any, languages: tuple[str, str], name: str) -> Iterator[Pair]:
    for row in rows:
        texts = row.get("translation", row)
        here = list(texts) if isinstance(texts, dict) else []
        if lacking := [language for language in languages if language not in here]:
            raise UserError(
                f"The dataset {name} has no language {lacking[0]!r} but {', '.join(here) or 'none'}"
                ": set dataset.source and dataset.target."
            )
        sides = [texts[language] for language in languages]
        # No text is an empty side; a line break would be two lines for everything that follows.
        yield Pair(*("" if side is None else " ".join(str(side).split()) for side in sides))


def _held_out(pairs: Pairs, wanted: str, missing: list[str]) -> Iterator[Pair]:
    for number, pair in enumerate(pairs()):
        index = number % HELD_OUT_EVERY
        if (missing[index] if index < len(missing) else "train") == wanted:
            yield pair


# -- token ids -------------------------------------------------------------------------------------


class Sentences:
    """Sentences as one array of ids, so that millions of them are not millions of lists.

    Sentence `i` is `ids[starts[i]:starts[i + 1]]`.
    """

    def __init__(self, sentences: Iterable[Sequence[int]] = ()) -> None:
        self.ids, self.starts = array("i"), array("q", [0])
        for sentence in sentences:
            self.append(sentence)

    def append(self, sentence: Sequence[int]) -> None:
        """Add a sentence."""
        self.ids.extend(sentence)
        self.starts.append(len(self.ids))

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of ids of each sentence."""
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> array[int]:
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def padded(self, rows: Sequence[int], value: int) -> Tensor:
        """Return the given sentences as one tensor, padded with `value` at their ends."""
        sentences = [torch.tensor(self[row], dtype=torch.long) for row in rows]
        return pad_sequence(sentences, batch_first=True, padding_value=value)


@dataclass
class EncodedPairs:
    """A split, ready for a model: every sentence ends in the end token."""

    source: Sentences
    target: Sentences
    pad: int
    pairs: list[Pair]
    """The text itself, where it was kept: references for BLEU."""

    def __len__(self) -> int:
        return len(self.source)

    def head(self, num: int | None) -> EncodedPairs:
        """Return the first `num` pairs, all of them for None."""
        rows = range(len(self))[:num]
        source, target = (Sentences(side[i] for i in rows) for side in (self.source, self.target))
        return EncodedPairs(source, target, self.pad, self.pairs[:num])

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the arguments of a translation model: source ids, their mask, targets."""
        batch = {
            "input_ids": self.source.padded(rows, self.pad),
            "attention_mask": self.source.padded(rows, -1).ge(0).long(),
            "targets": self.target.padded(rows, IGNORE_INDEX),
        }
        return {name: to_device(tensor, device) for name, tensor in batch.items()}


def joint_tokenizer(text: ParallelText, dataset: TranslationDataConfig) -> Any:
    """Return the tokenizer given, or one trained on both languages and kept in the cache."""
    if dataset.tokenizer is None:
        pairs = list(text.pairs("train"))
        content = key_of(*chain.from_iterable(pairs))
        return cached_tokenizer(lambda: chain.from_iterable(pairs), content, dataset)
    tokenizer = load_tokenizer(dataset.tokenizer, dataset.lowercase)
    for role in ("bos", "eos", "pad"):
        if getattr(tokenizer, f"{role}_token_id") is None:
            raise UserError(
                f"The tokenizer {dataset.tokenizer} has no {role} token, which a translator "
                "needs: give another, or none to train one."
            )
    return tokenizer


def encode_split(
    text: ParallelText, split: str, tokenizer: Any, max_length: int, *, truncate: bool
) -> EncodedPairs:
    """Return a split as token ids; see `encode_pairs`."""
    name = f"{text.name}, {split}"
    return encode_pairs(text.pairs(split), tokenizer, max_length, name, truncate=truncate)


def encode_pairs(
    pairs: Iterable[Pair], tokenizer: Any, max_length: int, name: str, *, truncate: bool
) -> EncodedPairs:
    """Return pairs as token ids, at most `max_length` a sentence; warnings call them `name`.

    `truncate` is for measuring, where every sentence counts: longer ones are cut, and the text is
    kept. Without it, for training, pairs with a longer sentence are left out.
    """
    encode, end = encoder_of(tokenizer), tokenizer.eos_token_id
    encoded = EncodedPairs(Sentences(), Sentences(), tokenizer.pad_token_id, [])
    num_pairs = num_long = 0
    iterator = iter(pairs)
    while chunk := list(islice(iterator, CHUNK)):
        sources, targets = (encode([pair[side] for pair in chunk]) for side in (0, 1))
        for pair, source, target in zip(chunk, sources, targets, strict=True):
            num_pairs += 1
            if max(len(source), len(target)) >= max_length:  # with the end token, longer
                num_long += 1
                if not truncate:
                    continue
            encoded.source.append([*source[: max_length - 1], end])
            encoded.target.append([*target[: max_length - 1], end])
            if truncate:
                encoded.pairs.append(pair)
    if num_long:
        said = "%s: %d of %d pairs are longer than %d tokens and were %s."
        done = "cut" if truncate else "left out"
        logger.warning(said, name, num_long, num_pairs, max_length, done)
    if num_long == num_pairs and not truncate:
        raise UserError(
            f"All {num_pairs} pairs of {name} are longer than {max_length} tokens: raise "
            "dataset.max_length."
        )
    return encoded
