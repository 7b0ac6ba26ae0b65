"""Tuning of maps by KL, as a task of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.hf.adapter import Adapter
from deepenough.shortcut.shortlist import HeadOfWords, Shortlist, Words
from deepenough.shortcut.tune_states import Positions, Source
from deepenough.shortcut.tuned_maps import Logits, TunedMaps, divergences
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.task import BatchLoss, Task

MAPS = "maps"
_ROWS = 128
"""Positions that are projected to the whole vocabulary at once."""


class TuneTask(Task):
    phase = MAPS
    unit = "positions"

    def __init__(
        self,
        model: TunedMaps,
        layers: Sequence[int],
        adapter: Adapter,
        source: Source,
        held_out: Positions,
        words: Shortlist | None,
        train: TrainingConfig,
        identity: dict[str, Any],
        save: Callable[[TuneTask, Path], None],
    ) -> None:
        """`held_out` is whitened as the positions of `source` are."""
        self.model, self.layers, self.adapter = model, list(layers), adapter
        self.source, self.held_out, self.words = source, held_out, words
        self.train, self._identity, self._save = train, identity, save
        self._head = HeadOfWords(adapter)
        self._latest: list[float] = []

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        # Decay of either pulls towards the closed form.
        return {MAPS: [{"params": [self.model.change, self.model.shift]}]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        index = step * self.train.accumulate + micro
        device = self.model.change.device
        states, last = (tensor.to(device) for tensor in self.source.batch(index))
        logits, log_weight = self._words(index)
        with torch.no_grad():
            log_p = (logits(last).float() + log_weight).log_softmax(-1)
        values = divergences(model(states), logits, log_p, log_weight)
        self._latest = values.detach().tolist()
        # The sum, so that a layer's gradient does not depend on how many others there are.
        return BatchLoss(values.sum(), values.detach().mean(), len(last))

    def _words(self, index: int) -> tuple[Logits, Tensor]:
        """From states to the logits of a batch's words, and the weights of those."""
        device = self.model.change.device
        if self.words is None:
            return self.adapter.logits, torch.zeros((), device=device)
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "words", index))
        chosen: Words = self.words.draw(generator)
        head = self._head(chosen.ids.to(device))
        return lambda state: head(self.adapter.final_norm(state)), chosen.log_weight.to(device)

    def train_values(self) -> dict[str, Any]:
        return {"kl": self._latest}

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """KL and agreement of the most probable word on held-out text, over all the vocabulary."""
        if split != "valid":
            return {}
        device = self.model.change.device
        kl = torch.zeros(len(self.layers), dtype=torch.float64)
        agreed = torch.zeros(len(self.layers), dtype=torch.float64)
        num = len(self.held_out.last)
        for first in range(0, num, _ROWS):
            rows = slice(first, first + _ROWS)
            log_p = self.adapter.logits(self.held_out.last[rows].to(device)).float().log_softmax(-1)
            mapped = self.model(self.held_out.states[:, rows].to(device))
            for place, state in enumerate(mapped):
                log_q = self.adapter.logits(state).float().log_softmax(-1)
                kl[place] += float((log_p.exp() * (log_p - log_q)).sum()) / num
                agreed[place] += float((log_p.argmax(-1) == log_q.argmax(-1)).sum()) / num
        values = {"loss": float(kl.mean()), "agreement": float(agreed.mean())}
        for layer, own_kl, own_agreed in zip(
            self.layers, kl.tolist(), agreed.tolist(), strict=True
        ):
            values |= {f"kl_{layer}": own_kl, f"agreement_{layer}": own_agreed}
        return values

    def identity(self) -> dict[str, Any]:
        return self._identity

    def save(self, folder: Path) -> None:
        self._save(self, folder)
