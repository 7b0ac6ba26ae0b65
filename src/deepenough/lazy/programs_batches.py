"""Batches of programs that have never been drawn before, each a function of seed and place.

Programs of some batches are drawn together and sorted by length, so that padding costs little;
batch `i` of a run can be asked for without having made those before its own pool.
"""

from __future__ import annotations

import random
from typing import Any

from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.lazy.programs import ProgramData, make_programs

POOL = 32
"""Batches that are drawn and sorted together."""


class ProgramBatches:
    def __init__(self, data: ProgramData, tokenizer: Any, seed: int) -> None:
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self._pool: tuple[int, EncodedPairs, list[list[int]]] | None = None

    def batch(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """The programs of batch `index`: rows of some encoded ones."""
        number, place = divmod(index, POOL)
        if self._pool is None or self._pool[0] != number:
            self._pool = number, *self._draw(number)
        return self._pool[1], self._pool[2][place]

    def _draw(self, number: int) -> tuple[EncodedPairs, list[list[int]]]:
        data = self.data
        place = f"{self.seed} pool {number}"
        programs = make_programs(data, POOL * data.batch_size, place)
        encoded = encode_pairs(
            (program.pair for program in programs),
            self.tokenizer,
            data.max_length,
            "programs",
            keep=False,
        )
        order = encoded.source.lengths.argsort(kind="stable").tolist()
        size = data.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        random.Random(place).shuffle(batches)
        return encoded, batches
