"""The parity task of ACT (arXiv 1603.08983, section 3.1) and PonderNet (arXiv 2107.05407, 4.1).

An input is a vector of `size` entries. Some of them, at random places, are 1 or -1, the others 0;
the label is 1 if the number of ones is odd. How many entries are not zero is the difficulty of the
input: a model that is trained on few and tested on more has to have found a procedure, not a table.

Batches are a function of their seed, so that a training can be resumed anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepenough.errors import UserError


class ParityBatch(NamedTuple):
    """B inputs of D entries."""

    vectors: Tensor
    """[B, D] of -1, 0 and 1, as floats."""
    labels: Tensor
    """[B], 1 where the number of ones is odd."""
    nonzero: Tensor
    """[B], how many entries are not zero: the difficulty."""


@dataclass
class ParityData:
    """Parity"""

    size: int = 16
    """Entries of an input vector."""

    train_nonzero: int = 10
    """Most entries that are not zero in training; more, up to the size, are for extrapolation."""

    batch_size: int = 128
    """Inputs in one batch, over all processes."""

    eval_size: int = 1000
    """Inputs of each difficulty band that are measured."""

    bands: int = 8
    """Equal ranges of difficulty, from 1 to the size, into which measurements are divided."""

    def check(self) -> None:
        for name in ("size", "train_nonzero", "batch_size", "eval_size", "bands"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name} must be at least 1: got {getattr(self, name)}.")
        if self.train_nonzero > self.size:
            raise UserError(
                f"data.train_nonzero is {self.train_nonzero}, but the vectors have only "
                f"{self.size} entries: raise data.size or lower it."
            )
        if self.size % self.bands:
            raise UserError(
                f"data.bands must divide data.size: {self.size} entries do not fall into "
                f"{self.bands} equal bands."
            )

    def ranges(self) -> Sequence[tuple[int, int]]:
        """Lowest and highest number of non-zero entries of each band."""
        width = self.size // self.bands
        return [(start + 1, start + width) for start in range(0, self.size, width)]


def parity_batch(num: int, size: int, lowest: int, highest: int, seed: int) -> ParityBatch:
    """`num` inputs, each with a number of non-zero entries drawn from lowest..highest."""
    if not 1 <= lowest <= highest <= size:
        raise ValueError(f"no vector of {size} entries has {lowest} to {highest} that are not 0")
    generator = torch.Generator().manual_seed(seed)
    nonzero = torch.randint(lowest, highest + 1, (num, 1), generator=generator)
    # The ranks of random numbers: a random place in the order for every entry of a vector.
    ranks = torch.rand(num, size, generator=generator).argsort(1).argsort(1)
    signs = torch.randint(0, 2, (num, size), generator=generator) * 2 - 1
    vectors = torch.where(ranks < nonzero, signs, 0)
    labels = (vectors == 1).sum(1) % 2
    return ParityBatch(vectors.float(), labels, nonzero[:, 0])


def parity_ref(vector: Sequence[float]) -> int:
    """The label of one vector, straight from its definition."""
    label = 0
    for entry in vector:
        if entry == 1:
            label = 1 - label
    return label
