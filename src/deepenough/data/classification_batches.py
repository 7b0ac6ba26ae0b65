"""Labelled texts as token ids, and batches of them of similar length.

Every epoch shuffles all examples, sorts them by length within pools of some dozen batches, and
shuffles the batches. Padding then costs little, every example still meets ever other neighbours,
and batch `i` of a run can be asked for without having made those before it, which is what resuming
needs. What does not fill a batch at the end of an epoch is left out of that epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepenough.data.classification import Example

logger = logging.getLogger("deepenough")

POOL = 50
"""Batches sorted together: more save padding, fewer mix better."""


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
        encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length, verbose=False)
        # Not the masks, which are all ones before there is padding.
        self.columns: dict[str, list[list[int]]] = {
            key: encoded[key] for key in ("input_ids", "token_type_ids") if key in encoded
        }
        self.lengths = [len(ids) for ids in self.columns["input_ids"]]
        num_full = sum(length == max_length for length in self.lengths)
        if num_full:
            logger.info("%d of %d %s texts fill or exceed %d tokens and may be cut.",
                        num_full, len(texts), name, max_length)  # fmt: skip

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Return a model's arguments for these examples: ids, mask, types, labels."""
        features = {key: [values[row] for row in rows] for key, values in self.columns.items()}
        features["attention_mask"] = [[1] * self.lengths[row] for row in rows]
        padded: Any = self.tokenizer.pad(features, return_tensors="pt")
        result: dict[str, Tensor] = dict(padded)
        result["labels"] = torch.tensor([self.labels[row] for row in rows])
        return {key: value.to(device) for key, value in result.items()}


class LengthBatches:
    """Batches of examples of similar length, in an order that is a function of the seed."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = min(batch_size, len(self.lengths))
        self.seed = seed
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.lengths) // self.batch_size

    def rows(self, index: int) -> list[int]:
        """Return the examples of batch `index`, counted over all epochs."""
        epoch, place = divmod(index, len(self))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._plan(epoch)
        rows: list[int] = self._epoch[1][place].tolist()
        return rows

    def _plan(self, epoch: int) -> np.ndarray:
        """Return the batches of an epoch, `[batches, batch_size]`."""
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))[: len(self) * self.batch_size]
        pool = POOL * self.batch_size
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        ordered = [part[np.argsort(self.lengths[part], kind="stable")] for part in pools]
        batches = np.concatenate(ordered).reshape(len(self), self.batch_size)
        return batches[generator.permutation(len(self))]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of all examples, the longest first, which need the most memory."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
