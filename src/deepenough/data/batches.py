"""Context batches: one token stream cut into lanes, so that a model's memory follows on.

With `B` lanes and segments of `S` tokens, lane `b` is the stream from `b*T*S` on, `T` segments
long, and batch `t` holds positions `t*S .. (t+1)*S` of every lane. Labels are the next tokens; the
last label of a lane is the first token of the next lane. Only the end of the stream is left out,
fewer than `B*S` tokens, however the corpus is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from deepenough.errors import UserError

Batch = dict[str, torch.Tensor]


class ContextBatches:
    """A sequence of `{"input_ids": [b, S], "labels": [b, S]}`, `b` being this rank's lanes.

    `labels[:, i]` is the token after `input_ids[:, i]`: they are shifted already.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.integer],
        batch_size: int,
        length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or length < 1:
            raise UserError(
                f"Batch size and length must be at least 1: got {batch_size} and {length}."
            )
        if batch_size % world_size:
            raise UserError(
                f"A batch of {batch_size} lanes cannot be shared by {world_size} processes: "
                f"make batch_size a multiple of {world_size}."
            )
        self.num_batches = max(len(ids) - 1, 0) // (batch_size * length)
        if self.num_batches == 0:
            raise UserError(
                f"The text has {len(ids)} tokens, but one batch of {batch_size} x {length} needs "
                f"{batch_size * length + 1}: give a longer text or lower batch_size or length."
            )
        self.batch_size, self.length = batch_size, length
        self.rank, self.world_size = rank, world_size
        used = batch_size * self.num_batches * length
        # Views of the mapped file: nothing is read before a batch is asked for.
        share = batch_size // world_size
        lanes = slice(rank * share, (rank + 1) * share)
        self._inputs = ids[:used].reshape(batch_size, -1)[lanes]
        self._labels = ids[1 : used + 1].reshape(batch_size, -1)[lanes]
        self.num_dropped = len(ids) - used - 1
        """Tokens at the end that are neither input nor label."""

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, t: int) -> Batch:
        if not -len(self) <= t < len(self):
            raise IndexError(f"batch {t} of {len(self)}")
        start = t % len(self) * self.length
        segment = slice(start, start + self.length)
        return {
            "input_ids": torch.from_numpy(self._inputs[:, segment].astype(np.int64)),
            "labels": torch.from_numpy(self._labels[:, segment].astype(np.int64)),
        }

    def __iter__(self) -> Iterator[Batch]:
        return self.iter_from(0)

    def iter_from(self, t: int) -> Iterator[Batch]:
        """The batches from `t` on, to continue a run where it stopped."""
        return (self[i] for i in range(t, len(self)))
