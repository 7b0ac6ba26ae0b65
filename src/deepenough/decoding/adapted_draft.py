"""Drafts of adapted early layers, token after token, over a cache of their own.

The layers are copies that have been changed (`adapted.py`), so their states are not what the
verification needs: it begins at the first layer, and these layers read for themselves what it has
confirmed. That is caught up on when the next draft is wanted, in the pass which that draft takes
anyway.

Shapes: B rows, T tokens, D width, S shortlist.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.decoding.adapted import Adapted, guess
from deepenough.decoding.carry import is_like, shortlist_head
from deepenough.decoding.costs import Costs
from deepenough.decoding.drafts import DraftSource, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.making import make_engine
from deepenough.decoding.rows import Row
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter

#: Slots are added in pieces of so many tokens.
_PIECE = 256


class AdaptedDraft(DraftSource):
    """The best words of `shortlist`, by the first `layer` adapted layers; by default all."""

    def __init__(
        self,
        adapted: Adapted,
        adapter: Adapter,
        shortlist: Tensor,
        most: int = 2,
        layer: int | None = None,
    ) -> None:
        super().__init__(most)
        self.layer = adapted.num_layers if layer is None else layer
        if not 1 <= self.layer <= adapted.num_layers:
            raise UserError(
                f"The first {adapted.num_layers} layers were adapted, so that drafts can come from "
                f"layers 1 to {adapted.num_layers}: got {self.layer}."
            )
        self.adapted, self.shortlist = adapted, shortlist
        self.engine = make_engine(adapted.layers_of(adapter))
        # Drafts need no state behind this layer.
        self.engine.num_layers = self.layer
        self.costs = Costs(self.engine.adapter)
        self._words: tuple[Tensor, Tensor | None] | None = None
        self._map, self._scale = (torch.empty(0), torch.empty(0)), torch.empty(0)
        self._numbers: list[int] = []
        """Rows that the cache holds; none before the first draft."""

    def begin(self, engine: Engine) -> None:
        model, own = engine.adapter.model, self.engine.adapter.model
        with torch.inference_mode(False):  # weights that are laid out anew stay ordinary tensors
            if (own.device, own.dtype) != (model.device, model.dtype):
                own.to(model.device, model.dtype)  # type: ignore[arg-type]
            self.engine.refresh()
        if self._words is None or not is_like(self._words[0], model):
            matrix, bias = self.adapted.maps[self.layer - 1]
            like = torch.empty(0, dtype=model.dtype, device=model.device)
            self._map, self._scale = (matrix.to(like), bias.to(like)), self.adapted.scale.to(like)
            self.shortlist = self.shortlist.to(model.device)
            weight, word_bias = shortlist_head(engine.adapter, self.shortlist)
            self._words = weight * self._scale, word_bias
        self._numbers = []

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        assert self._words is not None
        hidden_BD, read = self._read(rows)
        before_BD = state_BD / self._scale
        places: list[list[int]] = []
        for number in range(self.most):
            if number:
                token_B1 = torch.tensor(places[-1], device=state_BD.device)[:, None]
                step = self.engine.enter(token_B1, number - 1)
                hidden_BD = self.engine.through(step, step.hidden, 0, self.layer)[:, 0]
            before_BD = guess(*self._map, hidden_BD, before_BD)
            best_B = F.linear(before_BD, *self._words).argmax(-1)
            places.append(self.shortlist[best_B].tolist())
        own = self.costs.token(max(self.engine.lengths), last=self.layer)
        ending = 2.0 * (self._map[0].numel() + self._words[0].numel())
        flops = own * (read + self.most - 1) + ending * self.most
        return Proposal([list(drafts) for drafts in zip(*places, strict=True)], flops=flops)

    def _read(self, rows: list[Row]) -> tuple[Tensor, int]:
        """Read what the cache does not hold yet: states of the last tokens, and how many it was."""
        if not self._numbers:
            return self._begin(rows)
        self._follow(rows)
        known = self.engine.lengths
        counts = [len(row.context) - length for row, length in zip(rows, known, strict=True)]
        longest = max(counts)
        self.engine.reserve(_PIECE * (1 + (max(known) + longest + self.most) // _PIECE))
        # Shorter rows are filled up behind their last token, where nobody looks.
        lines = [
            row.context[length:] + [0] * (longest - count)
            for row, length, count in zip(rows, known, counts, strict=True)
        ]
        step = self.engine.enter(torch.tensor(lines, device=self.shortlist.device))
        hidden_BTD = self.engine.through(step, step.hidden, 0, self.layer)
        self.engine.keep(counts)
        last = torch.tensor(counts, device=hidden_BTD.device) - 1
        return hidden_BTD[torch.arange(len(rows), device=last.device), last], longest

    def _begin(self, rows: list[Row]) -> tuple[Tensor, int]:
        contexts = [torch.tensor(row.context) for row in rows]
        ids_BT = torch.nn.utils.rnn.pad_sequence(contexts, batch_first=True)
        lengths = torch.tensor([len(context) for context in contexts])
        longest = ids_BT.shape[1]
        mask_BT = (torch.arange(longest) < lengths[:, None]).long()
        device = self.shortlist.device
        self.engine.prefill(
            ids_BT.to(device),
            None if bool(mask_BT.all()) else mask_BT.to(device),
            _PIECE * (1 + (longest + self.most) // _PIECE),
        )
        self._numbers = [row.number for row in rows]
        return torch.stack([hidden_TD[-1] for hidden_TD in self.engine.prompt]), longest

    def _follow(self, rows: list[Row]) -> None:
        """Rows that have ended leave the cache too."""
        if len(rows) < len(self._numbers):
            numbers = [row.number for row in rows]
            self.engine.select([self._numbers.index(number) for number in numbers])
            self._numbers = numbers
