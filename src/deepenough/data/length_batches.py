"""Batches of examples of similar length, in an order that is a function of seed and place.

Every epoch shuffles all examples, sorts them by length within pools of some dozen batches, and
shuffles the batches. Padding then costs little, every example still meets ever other neighbours,
and batch `i` of a run can be asked for without having made those before it, which is what resuming
needs. What does not fill a batch at the end of an epoch is left out of that epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

POOL = 50
"""Batches sorted together: more save padding, fewer mix better."""


class LengthBatches:
    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = min(batch_size, len(self.lengths))
        self.seed = seed
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.lengths) // self.batch_size

    def rows(self, index: int) -> list[int]:
        """The examples of batch `index`, counted over all epochs."""
        epoch, place = divmod(index, len(self))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._plan(epoch)
        rows: list[int] = self._epoch[1][place].tolist()
        return rows

    def _plan(self, epoch: int) -> np.ndarray:
        """The batches of an epoch, `[batches, batch_size]`."""
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))[: len(self) * self.batch_size]
        pool = POOL * self.batch_size
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        ordered = [part[np.argsort(self.lengths[part], kind="stable")] for part in pools]
        batches = np.concatenate(ordered).reshape(len(self), self.batch_size)
        return batches[generator.permutation(len(self))]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """All examples once, longest first, so that memory that suffices at first suffices always."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
