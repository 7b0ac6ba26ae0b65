"""Parallel text as token ids: one tokenizer for both languages, and batches of so many tokens.

Each side of a split holds all its sentences in one flat array, so that millions of pairs are two
arrays and not millions of lists.

Every epoch shuffles all pairs, sorts them by length within pools, cuts each pool into batches that
hold at most `batch_tokens` on their longer side, padding included, and shuffles the batches. The
order depends on seed and epoch alone, so batch `i` of a run can be asked for without those before
it; as epochs differ somewhat in their number of batches, earlier epochs are planned and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.data.prepare import TRAINING_RECIPE
from deepenough.data.tokenizer import encoder_of, load_tokenizer, train_tokenizer
from deepenough.data.translation import Pair, ParallelText, TranslationDataConfig
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

CHUNK = 10_000
"""Pairs that are encoded at a time."""
IGNORE_INDEX = -100
"""Target of a position that is not to be predicted."""
POOL = 100
"""Batches sorted together: more save padding, fewer mix better."""


@dataclass
class Sentences:
    """Sentences as one array of ids; sentence `i` is `ids[starts[i]:starts[i + 1]]`."""

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Sentences:
        """Return lists of ids as one array."""
        lengths = [len(sentence) for sentence in sentences]
        ids = np.fromiter(chain.from_iterable(sentences), dtype=np.int32, count=sum(lengths))
        return cls(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @classmethod
    def join(cls, parts: Sequence[Sentences]) -> Sentences:
        """Return the sentences of all parts in order."""
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
        """Number of ids of each sentence."""
        return np.diff(self.starts)

    def head(self, num: int) -> Sentences:
        """Return the first `num` sentences."""
        return Sentences(self.ids[: self.starts[: num + 1][-1]], self.starts[: num + 1])

    def padded(self, rows: Sequence[int], value: int) -> Tensor:
        """Return the given sentences as one tensor, padded with `value` at their ends."""
        length = max(int(self.starts[row + 1] - self.starts[row]) for row in rows)
        result = np.full((len(rows), length), value, dtype=np.int64)
        for index, row in enumerate(rows):
            sentence = self[row]
            result[index, : len(sentence)] = sentence
        return torch.from_numpy(result)


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
        if num is None:
            return self
        return EncodedPairs(
            self.source.head(num), self.target.head(num), self.pad, self.pairs[:num]
        )

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the arguments of a translation model: source ids, their mask, targets."""
        ids = self.source.padded(rows, self.pad)
        lengths = torch.from_numpy(self.source.lengths[list(rows)])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "targets": self.target.padded(rows, IGNORE_INDEX),
        }
        return {name: tensor.to(device) for name, tensor in batch.items()}


def joint_tokenizer(text: ParallelText, dataset: TranslationDataConfig) -> Any:
    """Return the tokenizer given, or one trained on both languages and kept in the cache."""
    if dataset.tokenizer is not None:
        tokenizer = load_tokenizer(dataset.tokenizer, dataset.lowercase)
        for role in ("bos", "eos", "pad"):
            if getattr(tokenizer, f"{role}_token_id") is None:
                raise UserError(
                    f"The tokenizer {dataset.tokenizer} has no {role} token, which a translator "
                    "needs: give another, or none to train one."
                )
        return tokenizer
    pairs = list(text.pairs("train"))

    def fill(folder: Path) -> None:
        lines = chain.from_iterable(pairs)
        train_tokenizer(lines, dataset.vocab_size, dataset.lowercase, (), folder)

    lines = key_of(*chain.from_iterable(pairs))
    key = key_of(TRAINING_RECIPE, "joint", lines, str(dataset.vocab_size), str(dataset.lowercase))
    return load_tokenizer(entry(cache_folder(dataset.cache) / "tokenizers" / key, fill))


def encode_pairs(
    pairs: Iterable[Pair], tokenizer: Any, max_length: int, name: str, *, truncate: bool
) -> EncodedPairs:
    """Return pairs as token ids.

    Args:
        pairs: The text.
        tokenizer: Of both languages.
        max_length: Most tokens of a sentence.
        name: What warnings call the text.
        truncate: True for measuring, where every sentence counts: longer sentences are cut, and the
            text is kept. False for training: pairs with a longer sentence are left out.
    """
    encode, end = encoder_of(tokenizer), tokenizer.eos_token_id
    sources: list[Sentences] = []
    targets: list[Sentences] = []
    kept: list[Pair] = []
    num_pairs = num_long = 0
    iterator = iter(pairs)
    while chunk := list(islice(iterator, CHUNK)):
        sides = [[[*ids, end] for ids in encode([pair[side] for pair in chunk])] for side in (0, 1)]
        is_long = [max(map(len, pair)) > max_length for pair in zip(*sides, strict=True)]
        num_pairs, num_long = num_pairs + len(chunk), num_long + sum(is_long)
        if truncate:
            kept += chunk
            sides = [[_truncated(ids, max_length) for ids in side] for side in sides]
        else:
            sides = [
                [ids for ids, long in zip(side, is_long, strict=True) if not long] for side in sides
            ]
        sources.append(Sentences.of(sides[0]))
        targets.append(Sentences.of(sides[1]))
    if num_long:
        logger.warning(
            "%s: %d of %d pairs are longer than %d tokens and were %s.",
            name, num_long, num_pairs, max_length, "cut" if truncate else "left out",
        )  # fmt: skip
    if num_long == num_pairs and not truncate:
        raise UserError(
            f"All {num_pairs} pairs of {name} are longer than {max_length} tokens: raise "
            "dataset.max_length."
        )
    return EncodedPairs(
        Sentences.join(sources), Sentences.join(targets), tokenizer.pad_token_id, kept
    )


def _truncated(ids: list[int], max_length: int) -> list[int]:
    """Return at most `max_length` ids, the last of which is the end token."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


class TokenBatches:
    """Batches of at most `batch_tokens` tokens, as rows of the training pairs."""

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, seed: int
    ) -> None:
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.lengths = np.maximum(source_lengths, target_lengths)
        if self.lengths.max(initial=0) > batch_tokens:
            raise ValueError(f"a sentence is longer than a batch of {batch_tokens} tokens")
        self.batch_tokens, self.seed = batch_tokens, seed
        self._starts = [0]  # index of the first batch of each epoch known so far, and the next
        self._epoch: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        """Return the number of batches of the first epoch; others have nearly as many."""
        self._count(1)
        return self._starts[1]

    def rows(self, index: int) -> list[int]:
        """Return the pairs of batch `index`, counted over all epochs."""
        epoch = 0
        while True:
            self._count(epoch + 1)
            if index < self._starts[epoch + 1]:
                break
            epoch += 1
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._plan(epoch)
        rows: list[int] = self._epoch[1][index - self._starts[epoch]].tolist()
        return rows

    def _count(self, num_epochs: int) -> None:
        while len(self._starts) <= num_epochs:
            epoch = len(self._starts) - 1
            plan = self._plan(epoch)
            self._epoch = epoch, plan
            self._starts.append(self._starts[-1] + len(plan))

    def _plan(self, epoch: int) -> list[np.ndarray]:
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))
        mean_rows = max(1, self.batch_tokens // max(1, int(self.lengths.mean())))
        pool = POOL * mean_rows
        batches: list[np.ndarray] = []
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            by_length = np.lexsort((self.source_lengths[part], self.target_lengths[part]))
            batches += cut_by_tokens(part[by_length], self.lengths, self.batch_tokens)
        return [batches[index] for index in generator.permutation(len(batches))]


def cut_by_tokens(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Return rows in this order, cut so that rows times the longest stay within the limit."""
    batches, start, longest = [], 0, 0
    for index, length in enumerate(lengths[order].tolist()):
        grown = max(longest, length)
        if grown * (index + 1 - start) > batch_tokens:
            batches.append(order[start:index])
            start, grown = index, length
        longest = grown
    if start < len(order):
        batches.append(order[start:])
    return batches
