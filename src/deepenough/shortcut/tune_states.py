"""The states that maps are tuned on: read once and kept where they fit, else computed when needed.

A text's states cost a forward pass, and every step needs some. Kept are the states of the tuned
layers and of the last one, in float32 if that fits the memory limit, else in bfloat16 (whitened,
where all coordinates are of one size, which suits it); beyond that, nothing is kept but tokens.

A part of the texts is held out, to see how the maps do on text they are not tuned on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.reading import Tally, TokenBatch, batches, make_reading, run_batch
from deepenough.shortcut.tuned_maps import Whitening
from deepenough.training.config import seed_at
from deepenough.training.distributed import is_main_process
from deepenough.training.logging import reading

HELD_OUT_EVERY = 16
"""One in so many batches of text is held out: about 6 % of it."""
SAMPLE_PER_WIDTH = 8
"""Positions per unit of width from which covariances are taken: enough for a good step size."""


class Positions(NamedTuple):
    """`N` positions: states of the tuned layers, `[L, N, D]`, and of the last, `[N, D]`."""

    states: Tensor
    last: Tensor


class Texts:
    """Batches of tokens, and the positions they give when they are run."""

    def __init__(
        self,
        adapter: Adapter,
        tokenizer: Any,
        texts: Iterable[str],
        layers: Sequence[int],
        batch: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
        window: int | None = None,
    ) -> None:
        """Of several processes, number `share[0]` of `share[1]` tunes on its share of the text."""
        self.adapter, self.layers, self.tally = adapter, list(layers), Tally()
        how = make_reading(adapter, "all", seed, batch_tokens=batch, window=window)
        found = list(batches(tokenizer, texts, how, self.tally))
        rank, world_size = share
        if len(found) < 1 + world_size:
            raise UserError(
                f"The texts make {len(found)} batches, but {1 + world_size} are needed, one of "
                "them to hold out: give more text or a smaller batch."
            )
        # Neighbouring batches are of similar length, so every so-many-th is a fair sample.
        every = min(HELD_OUT_EVERY, len(found))
        self._held_out = found[every - 1 :: every]
        del found[every - 1 :: every]
        self._all, self._seed = found, seed
        self.tuned_on = found[rank::world_size]

    @property
    def num_positions(self) -> int:
        """To tune on, in this process."""
        return sum(len(window.ids) for batch in self.tuned_on for window in batch.windows)

    def run(self, batch: TokenBatch) -> Positions:
        states = run_batch(self.adapter, batch).states
        return Positions(
            torch.stack([states[layer].float() for layer in self.layers]), states[-1].float()
        )

    def sample(self, num: int) -> Positions:
        """About `num` positions of the text of all processes, the same for each."""
        return self._sample(self._all, num)

    def held_out_positions(self, num: int) -> Positions:
        """About `num` positions of text that is not tuned on."""
        return self._sample(self._held_out, num)

    def _sample(self, among: Sequence[TokenBatch], num: int) -> Positions:
        generator = torch.Generator().manual_seed(seed_at(self._seed, "sample"))
        found: list[Positions] = []
        missing = num
        for index in torch.randperm(len(among), generator=generator).tolist():
            states, last = self.run(among[index])
            found.append(Positions(states[:, :missing].cpu(), last[:missing].cpu()))
            missing -= len(found[-1].last)
            if not missing:
                break
        return Positions(
            torch.cat([part.states for part in found], 1), torch.cat([part.last for part in found])
        )


class Source(Protocol):
    """Where a step's positions come from, whitened; the same for the same step."""

    kind: str

    def batch(self, index: int) -> Positions: ...


class Kept:
    """All positions in memory; an epoch is a random order of them."""

    def __init__(
        self, texts: Texts, white: Whitening, batch: int, seed: int, dtype: torch.dtype
    ) -> None:
        self.kind = f"kept in {str(dtype).removeprefix('torch.')}"
        num, width, self.seed = texts.num_positions, texts.adapter.width, seed
        self.size = min(batch, num)
        self.states = torch.empty(len(texts.layers), num, width, dtype=dtype)
        self.last = torch.empty(num, width)
        done = 0
        with reading("positions") as show:
            for tokens in texts.tuned_on:
                states, last = texts.run(tokens)
                rows = slice(done, done := done + len(last))
                self.states[:, rows], self.last[rows] = white(states), last
                if is_main_process():
                    show(done, num)

    def batch(self, index: int) -> Positions:
        epoch, turn = divmod(index, len(self.last) // self.size)
        generator = torch.Generator().manual_seed(seed_at(self.seed, "positions", epoch))
        order = torch.randperm(len(self.last), generator=generator)
        chosen = order[turn * self.size : (turn + 1) * self.size]
        return Positions(self.states[:, chosen].float(), self.last[chosen])


def kept_bytes(texts: Texts, dtype: torch.dtype) -> int:
    """What `Kept` takes."""
    return texts.num_positions * texts.adapter.width * (len(texts.layers) * dtype.itemsize + 4)


def make_source(texts: Texts, white: Whitening, batch: int, seed: int, limit: float) -> Source:
    """Kept as exactly as the limit (in bytes) allows."""
    for dtype in (torch.float32, torch.bfloat16):
        if kept_bytes(texts, dtype) <= limit:
            return Kept(texts, white, batch, seed, dtype)
    return Recomputed(texts, white, seed)


class Recomputed:
    """Nothing in memory: every step runs the model on one batch of text."""

    kind = "recomputed"

    def __init__(self, texts: Texts, white: Whitening, seed: int) -> None:
        self.texts, self.white, self.seed = texts, white, seed

    def batch(self, index: int) -> Positions:
        epoch, turn = divmod(index, len(self.texts.tuned_on))
        generator = torch.Generator().manual_seed(seed_at(self.seed, "texts", epoch))
        order = torch.randperm(len(self.texts.tuned_on), generator=generator)
        states, last = self.texts.run(self.texts.tuned_on[int(order[turn])])
        return Positions(self.white(states), last)
