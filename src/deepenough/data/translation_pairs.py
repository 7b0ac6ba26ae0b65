"""Pairs as token ids: their tokenizer, a flat array for each side, and batches as models take them.

A side holds all sentences of a split in a row, so that millions of pairs are two arrays and not
millions of lists.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepenough.data.cache import cache_folder, entry, key_of
from deepenough.data.prepare import TRAINING_RECIPE
from deepenough.data.tokenizer import encoder_of, load_tokenizer, train_tokenizer
from deepenough.data.translation import Pair, ParallelText, TranslationData
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

CHUNK = 10_000
"""Pairs that are encoded at a time."""
IGNORED = -100
"""Target of a position that is not to be predicted."""


@dataclass
class Sentences:
    """Sentences as ids in a row; sentence `i` is `ids[starts[i]:starts[i + 1]]`."""

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Sentences:
        lengths = [len(sentence) for sentence in sentences]
        ids = np.fromiter(chain.from_iterable(sentences), dtype=np.int32, count=sum(lengths))
        return cls(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @classmethod
    def join(cls, parts: Sequence[Sentences]) -> Sentences:
        ends = np.cumsum([0, *(len(part.ids) for part in parts)])
        starts = [part.starts[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
        return cls(
            np.concatenate([part.ids for part in parts]), np.concatenate([*starts, ends[-1:]])
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def head(self, num: int) -> Sentences:
        """The first `num`."""
        return Sentences(self.ids[: self.starts[: num + 1][-1]], self.starts[: num + 1])

    def padded(self, rows: Sequence[int], value: int) -> Tensor:
        length = max(int(self.starts[row + 1] - self.starts[row]) for row in rows)
        result = np.full((len(rows), length), value, dtype=np.int64)
        for place, row in enumerate(rows):
            sentence = self[row]
            result[place, : len(sentence)] = sentence
        return torch.from_numpy(result)


@dataclass
class EncodedPairs:
    """A split, ready for a model: every sentence ends in the end token."""

    source: Sentences
    target: Sentences
    pad: int
    pairs: list[Pair]
    """The text itself, where it was asked to be kept: references to be compared with."""

    def __len__(self) -> int:
        return len(self.source)

    def head(self, num: int | None) -> EncodedPairs:
        """The first `num`, or all."""
        if num is None:
            return self
        return EncodedPairs(
            self.source.head(num), self.target.head(num), self.pad, self.pairs[:num]
        )

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Arguments of a translation model: source ids, their mask, targets."""
        ids = self.source.padded(rows, self.pad)
        lengths = torch.from_numpy(self.source.lengths[list(rows)])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "targets": self.target.padded(rows, IGNORED),
        }
        return {name: tensor.to(device) for name, tensor in batch.items()}


def joint_tokenizer(text: ParallelText, data: TranslationData) -> Any:
    """The tokenizer that is given, or one trained on both languages together, kept in the cache."""
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer, data.lowercase)
        for role in ("bos", "eos", "pad"):
            if getattr(tokenizer, f"{role}_token_id") is None:
                raise UserError(
                    f"The tokenizer {data.tokenizer} has no {role} token, which a translator "
                    "needs: give another, or none to train one."
                )
        return tokenizer
    pairs = list(text.pairs("train"))

    def fill(folder: Path) -> None:
        train_tokenizer(chain.from_iterable(pairs), data.vocab_size, data.lowercase, (), folder)

    lines = key_of(*chain.from_iterable(pairs))
    key = key_of(TRAINING_RECIPE, "joint", lines, str(data.vocab_size), str(data.lowercase))
    return load_tokenizer(entry(cache_folder(data.cache) / "tokenizers" / key, fill))


def encode_pairs(
    pairs: Iterable[Pair], tokenizer: Any, max_length: int, name: str, *, keep: bool
) -> EncodedPairs:
    """With `keep`, all pairs and their text, sources cut at the limit; else only those within it.

    The first is for measuring, where every sentence counts, the second for training.
    """
    encode, end = encoder_of(tokenizer), tokenizer.eos_token_id
    sides: tuple[list[Sentences], list[Sentences]] = ([], [])
    kept: list[Pair] = []
    num_pairs = num_long = 0
    for chunk in _chunks(pairs):
        sources = [[*ids, end] for ids in encode([pair.source for pair in chunk])]
        targets = [[*ids, end] for ids in encode([pair.target for pair in chunk])]
        both = list(zip(sources, targets, strict=True))
        is_long = [max(map(len, pair)) > max_length for pair in both]
        num_pairs, num_long = num_pairs + len(both), num_long + sum(is_long)
        if keep:
            kept += chunk
            both = [tuple([*ids[: max_length - 1], end] if len(ids) > max_length else ids
                          for ids in pair) for pair in both]  # type: ignore[misc] # fmt: skip
        else:
            both = [pair for pair, long in zip(both, is_long, strict=True) if not long]
        sides[0].append(Sentences.of([source for source, _ in both]))
        sides[1].append(Sentences.of([target for _, target in both]))
    if num_long:
        logger.warning(
            "%s: %d of %d pairs are longer than %d tokens and were %s.",
            name, num_long, num_pairs, max_length, "cut" if keep else "left out",
        )  # fmt: skip
    if num_long == num_pairs and not keep:
        raise UserError(
            f"All {num_pairs} pairs of {name} are longer than {max_length} tokens: raise "
            "data.max_length."
        )
    joined = [Sentences.join(side) for side in sides]
    return EncodedPairs(joined[0], joined[1], tokenizer.pad_token_id, kept)


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    iterator = iter(pairs)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
