"""Batches of rows of similar length, in an order that depends on seed and epoch alone.

Every epoch shuffles all rows, sorts them by length within pools of some dozen batches, and shuffles
the batches. Padding then costs little, every row still meets ever other neighbours, and batch `i`
of a run can be asked for without those before it, which is what resuming needs.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class EpochBatches(ABC):
    """Batches of row numbers, counted over all epochs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._starts = [0]  # index of the first batch of each epoch known so far, and the next
        self._planned: tuple[int, Sequence[np.ndarray]] = (-1, ())

    def __len__(self) -> int:
        """Return the number of batches of the first epoch; others have nearly as many."""
        self.rows(0)
        return self._starts[1]

    def rows(self, index: int) -> list[int]:
        """Return the rows of batch `index`, counted over all epochs."""
        # Epochs may differ somewhat in their number of batches, so earlier ones are planned too.
        while self._starts[-1] <= index:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, index) - 1
        rows: list[int] = self._epoch(epoch)[index - self._starts[epoch]].tolist()
        return rows

    def _epoch(self, epoch: int) -> Sequence[np.ndarray]:
        if self._planned[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            batches = self._plan(generator)
            order = generator.permutation(len(batches))
            self._planned = epoch, [batches[index] for index in order]
        return self._planned[1]

    @abstractmethod
    def _plan(self, generator: np.random.Generator) -> Sequence[np.ndarray]:
        """Return the batches of an epoch, pool by pool."""


class LengthBatches(EpochBatches):
    """Batches of so many rows; what does not fill one at the end of an epoch is left out of it."""

    POOL = 50
    """Batches sorted together: more save padding, fewer mix better."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(seed)
        self.lengths = np.asarray(lengths)
        self.batch_size = min(batch_size, len(self.lengths))

    def _plan(self, generator: np.random.Generator) -> Sequence[np.ndarray]:
        num_batches = len(self.lengths) // self.batch_size
        order = generator.permutation(len(self.lengths))[: num_batches * self.batch_size]
        pool = self.POOL * self.batch_size
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        ordered = [part[np.argsort(self.lengths[part], kind="stable")] for part in pools]
        return list(np.concatenate(ordered).reshape(num_batches, self.batch_size))


class TokenBatches(EpochBatches):
    """Batches of pairs with at most `batch_tokens` on their longer side, padding included."""

    POOL = 100

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, seed: int
    ) -> None:
        super().__init__(seed)
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.lengths = np.maximum(source_lengths, target_lengths)
        self.batch_tokens = batch_tokens

    def _plan(self, generator: np.random.Generator) -> Sequence[np.ndarray]:
        order = generator.permutation(len(self.lengths))
        pool = self.POOL * max(1, self.batch_tokens // max(1, int(self.lengths.mean())))
        batches: list[np.ndarray] = []
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            by_length = np.lexsort((self.source_lengths[part], self.target_lengths[part]))
            batches += cut_by_tokens(part[by_length], self.lengths, self.batch_tokens)
        return batches


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


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of all rows, the longest first, which need the most memory."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
