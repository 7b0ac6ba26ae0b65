"""Drafts of a draft head, token after token, over a cache of its own.

Before a pass of the model, the head reads the tokens that the last pass has confirmed, with the
states that pass has left, and drafts the next token; then it reads its own drafts with its own
predictions. Those are forgotten: what the cache keeps is what was confirmed.

Shapes: B rows, T tokens, D width, S shortlist.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.decoding.carry import is_like, shortlist_head
from deepenough.decoding.drafts import DraftSource, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.head import DraftHead, position_codes
from deepenough.decoding.rows import Row
from deepenough.decoding.slots import NO_SLOTS, Place, Slots, attend

#: Slots are added in pieces of so many tokens.
_PIECE = 256


class HeadDraft(DraftSource):
    """The best words of `shortlist`, by the states that `head` predicts."""

    def __init__(self, head: DraftHead, shortlist: Tensor, most: int = 2) -> None:
        super().__init__(most)
        self.head, self.shortlist = head, shortlist
        self._words: tuple[Tensor, Tensor | None] | None = None
        self._slots = NO_SLOTS
        self._codes = torch.empty(0), torch.empty(0)
        self._numbers: list[int] = []
        self._known: list[int] = []
        """Tokens of each row that the cache holds."""
        self._pending: list[Tensor] = []
        """States before each token that it does not hold yet, `[T, D]`."""

    def begin(self, engine: Engine) -> None:
        model, shape = engine.adapter.model, self.head.shape
        if self._words is None or not is_like(self._words[0], model):
            if not is_like(self.head.scale, model):
                # A copy: others may draft with the same head for a model of other numbers.
                self.head = copy.deepcopy(self.head).to(model.device, model.dtype)
            self.shortlist = self.shortlist.to(model.device)
            weight, bias = shortlist_head(engine.adapter, self.shortlist)
            self._words = weight * self.head.scale, bias
        batch, longest = len(engine.prompt), max(map(len, engine.prompt))
        room = (batch, shape.key_heads, longest + 1, shape.head_width)
        self._slots = Slots(1, room, model.dtype, model.device)
        self._numbers, self._known = list(range(batch)), [0] * batch
        # Before the first token there is nothing.
        self._pending = [
            F.pad(engine.norm(hidden_TD) / self.head.scale, (0, 0, 1, 0))
            for hidden_TD in engine.prompt
        ]

    def observe(self, rows: list[Row], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        self._follow(rows)
        states_BTD = normed_BTD / self.head.scale
        self._pending = [
            torch.cat([pending, states_TD[:count]]) if len(pending) else states_TD[:count]
            for pending, states_TD, count in zip(self._pending, states_BTD, counts, strict=True)
        ]

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        assert self._words is not None
        self._follow(rows)
        counts = [len(pending) for pending in self._pending]
        longest = max(counts)
        self._make_room(max(self._known) + longest + self.most, state_BD)
        # Shorter rows are filled up behind their last token, where nobody looks.
        lines = [
            row.context[known : known + count] + [0] * (longest - count)
            for row, known, count in zip(rows, self._known, counts, strict=True)
        ]
        states_BTD = torch.nn.utils.rnn.pad_sequence(self._pending, batch_first=True)
        predicted_BTD = self._run(lines, states_BTD, self._known, engine)
        self._known = [known + count for known, count in zip(self._known, counts, strict=True)]
        self._pending = [states_TD[:0] for states_TD in states_BTD]
        if longest == 1:
            state_BD = predicted_BTD[:, 0]
        else:
            last = torch.tensor(counts, device=predicted_BTD.device) - 1
            state_BD = predicted_BTD[torch.arange(len(rows), device=last.device), last]
        places = [self._best(state_BD)]
        for number in range(1, self.most):
            ahead = [known + number - 1 for known in self._known]
            lines = [[token] for token in places[-1]]
            state_BD = self._run(lines, state_BD[:, None], ahead, engine)[:, 0]
            places.append(self._best(state_BD))
        size = sum(p.numel() for p in self.head.parameters())
        flops = 2.0 * (size * (longest + self.most - 1) + self._words[0].numel() * self.most)
        return Proposal([list(drafts) for drafts in zip(*places, strict=True)], flops=flops)

    def _run(
        self, lines: list[list[int]], states_BTD: Tensor, starts: list[int], engine: Engine
    ) -> Tensor:
        model, shape = engine.adapter.model, self.head.shape
        tokens_BT = torch.tensor(lines, device=states_BTD.device)
        embeddings_BTD = model.get_input_embeddings()(tokens_BT)
        groups = shape.heads // shape.key_heads
        place = Place(starts, tokens_BT.shape[1], groups, states_BTD.dtype, str(states_BTD.device))
        slots = self._slots.keys[0], self._slots.values[0]
        return self.head.step(
            self.head.read(embeddings_BTD, states_BTD),
            (self._codes[0][place.positions], self._codes[1][place.positions]),
            lambda query, key, value: attend(place, slots, query, key, value),
        )

    def _make_room(self, tokens: int, like: Tensor) -> None:
        capacity = _PIECE * (1 + tokens // _PIECE)
        self._slots.grow(capacity)
        codes = self._codes[0]
        if len(codes) < capacity or codes.device != like.device or codes.dtype != like.dtype:
            self._codes = position_codes(torch.arange(capacity), self.head.shape, like)

    def _best(self, state_BD: Tensor) -> list[int]:
        assert self._words is not None
        return self.shortlist[F.linear(state_BD, *self._words).argmax(-1)].tolist()

    def _follow(self, rows: list[Row]) -> None:
        """Rows that have ended leave the cache too."""
        if len(rows) == len(self._numbers):
            return
        numbers = [row.number for row in rows]
        staying = [self._numbers.index(number) for number in numbers]
        self._slots.select(staying)
        self._numbers = numbers
        self._known = [self._known[place] for place in staying]
        self._pending = [self._pending[place] for place in staying]
