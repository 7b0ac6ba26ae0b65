"""Drafts from the first layers: run `k` of them, jump to the last state, take the best word.

The states and the keys and values of those `k` layers are what the verification needs first, so it
begins at layer `k + 1`: drafting costs a map and a projection on a shortlist, and that the first
layers run for one token after the other.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.decoding.carry import is_like, shortlist_head
from deepenough.decoding.drafts import DraftSource, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.rows import Row
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts


class ShortcutDraft(DraftSource):
    """`layer` layers and the map from there to the last; `shortlist` None for all words."""

    def __init__(
        self,
        shortcuts: Shortcuts,
        layer: int,
        most: int = 1,
        shortlist: Tensor | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__(most)
        if not 0 <= layer < shortcuts.num_layers:
            raise UserError(
                f"Drafts can come from layers 0 to {shortcuts.num_layers - 1}: got {layer}."
            )
        self.shortcuts, self.layer, self.mode = shortcuts, layer, mode
        self.shortlist = shortlist
        self._words: tuple[Tensor, Tensor | None] | None = None

    def begin(self, engine: Engine) -> None:
        model = engine.adapter.model
        if self.shortlist is None or (self._words is not None and is_like(self._words[0], model)):
            return
        self.shortlist = self.shortlist.to(model.device)
        self._words = shortlist_head(engine.adapter, self.shortlist)

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        last = engine.num_layers
        token_B1 = torch.tensor([[row.context[-1]] for row in rows], device=state_BD.device)
        places: list[list[int]] = []
        states = []
        for offset in range(self.most + 1):
            step = engine.enter(token_B1, offset)
            states.append(engine.through(step, step.hidden, 0, self.layer))
            if offset == self.most:  # the last draft drafts nothing, but is verified
                break
            jumped = self.shortcuts.apply(states[-1][:, 0], self.layer, last, self.mode)
            token_B1 = self._best(engine.norm(jumped), engine)[:, None]
            places.append(token_B1[:, 0].tolist())
        size = engine.adapter.width
        words = None if self._words is None else len(self._words[0])
        words = words or engine.adapter.model.config.get_text_config().vocab_size
        return Proposal(
            [list(drafts) for drafts in zip(*places, strict=True)],
            hidden=torch.cat(states, dim=1),
            layer=self.layer,
            flops=self.most * 2.0 * size * (size + words),
        )

    def _best(self, normed_BD: Tensor, engine: Engine) -> Tensor:
        if self._words is None or self.shortlist is None:
            return engine.head(normed_BD).argmax(-1)
        return self.shortlist[F.linear(normed_BD, *self._words).argmax(-1)]
