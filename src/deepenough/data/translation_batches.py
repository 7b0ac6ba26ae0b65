"""Batches of so many tokens, not sentences, in an order that is a function of seed and place.

Every epoch shuffles all pairs, sorts them by length within pools, cuts each pool into batches that
hold at most `batch_tokens` on their longer side, padding included, and shuffles the batches. As in
`length_batches`, batch `i` of a run can be asked for without those before it; as epochs differ
somewhat in their number of batches, those before it are counted, not made.
"""

from __future__ import annotations

import numpy as np

POOL = 100
"""Batches sorted together: more save padding, fewer mix better."""


class TokenBatches:
    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, seed: int
    ) -> None:
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        self.lengths = np.maximum(source_lengths, target_lengths)
        if self.lengths.max(initial=0) > batch_tokens:
            raise ValueError(f"a sentence is longer than a batch of {batch_tokens} tokens")
        self.batch_tokens, self.seed = batch_tokens, seed
        self._firsts = [0]  # of each epoch known so far and the one after: its first batch
        self._epoch: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        """Batches of the first epoch; others have nearly as many."""
        self._count(1)
        return self._firsts[1]

    def rows(self, index: int) -> list[int]:
        """The pairs of batch `index`, counted over all epochs."""
        epoch = 0
        while True:
            self._count(epoch + 1)
            if index < self._firsts[epoch + 1]:
                break
            epoch += 1
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._plan(epoch)
        rows: list[int] = self._epoch[1][index - self._firsts[epoch]].tolist()
        return rows

    def _count(self, num_epochs: int) -> None:
        while len(self._firsts) <= num_epochs:
            epoch = len(self._firsts) - 1
            plan = self._plan(epoch)
            self._epoch = epoch, plan
            self._firsts.append(self._firsts[-1] + len(plan))

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
        return [batches[place] for place in generator.permutation(len(batches))]


def cut_by_tokens(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Rows in this order, cut so that rows times the longest of a batch stay within the limit."""
    batches, start, longest = [], 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        grown = max(longest, length)
        if grown * (place + 1 - start) > batch_tokens:
            batches.append(order[start:place])
            start, grown = place, length
        longest = grown
    if start < len(order):
        batches.append(order[start:])
    return batches
