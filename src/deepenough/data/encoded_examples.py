"""Labelled texts as token ids, and batches of them as a model takes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepenough.data.classification import Example

log = logging.getLogger("deepenough")


class EncodedExamples:
    """Examples read by a tokenizer, texts longer than `max_length` tokens cut."""

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
            log.info("%d of %d %s texts fill or exceed %d tokens and may be cut.",
                     num_full, len(texts), name, max_length)  # fmt: skip

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """Arguments of a model for these examples: ids, mask, types where it has them, labels."""
        features = {key: [values[row] for row in rows] for key, values in self.columns.items()}
        features["attention_mask"] = [[1] * self.lengths[row] for row in rows]
        padded: Any = self.tokenizer.pad(features, return_tensors="pt")
        result: dict[str, Tensor] = dict(padded)
        result["labels"] = torch.tensor([self.labels[row] for row in rows])
        return {key: value.to(device) for key, value in result.items()}
