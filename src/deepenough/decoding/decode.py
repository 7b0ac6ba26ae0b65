"""The loop: guess, run the model once over guesses and all, keep what it confirms.

Without a source of drafts this is plain decoding, a token at a time. A pass costs about what one
token costs as long as the guesses are few, since it is the weights that have to be read.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepenough.decoding.choosing import Chooser
from deepenough.decoding.costs import Costs
from deepenough.decoding.drafts import DraftSource, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.request import Request
from deepenough.decoding.rows import Row, make_rows

log = logging.getLogger("deepenough")


@dataclass
class Generated:
    """All rows at the end, and how it went."""

    rows: list[Row]
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    interrupted: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def decode(engine: Engine, request: Request, source: DraftSource | None = None) -> Generated:
    """Generate with all layers; Ctrl-C ends it with what there is."""
    chosen = None if request.in_step else source
    return run_loop(
        request, lambda chooser, result: _Loop(engine, request, chooser, chosen, result)
    )


def run_loop(request: Request, make_loop: Callable[[Chooser, Generated], Any]) -> Generated:
    """What the loops have in common: their beginning, and an end that may come early."""
    rows = make_rows(request)
    chooser = Chooser(request)
    result = Generated(rows, scores=chooser.scores, logits=chooser.logits)
    try:
        with torch.inference_mode():
            make_loop(chooser, result).run()
    except KeyboardInterrupt:
        if not all(row.tokens for row in rows):
            raise
        log.warning("interrupted: what was generated so far is returned")
        result.interrupted = True
    return result


class _Loop:
    def __init__(
        self,
        engine: Engine,
        request: Request,
        chooser: Chooser,
        source: DraftSource | None,
        result: Generated,
    ) -> None:
        self.engine, self.request, self.chooser = engine, request, chooser
        self.source, self.result = source, result
        self.costs = Costs(engine.adapter)
        # Rows that go on drawing beside finished ones draw what they would in transformers.
        self.rows_leave = not (request.in_step or (request.sampled and source is None))

    def run(self) -> None:
        request, engine = self.request, self.engine
        rows = list(self.result.rows)
        room = request.max_length + (self.source.most if self.source else 0)
        state_BD = engine.prefill(request.ids_BT, request.mask_BT, room)
        if self.source is not None:
            self.source.begin(engine)
        nothing = Proposal([[] for _ in rows])
        self._choose(rows, engine.head(state_BD)[:, None], nothing)
        while True:
            if self.rows_leave and any(row.done for row in rows):
                staying = [place for place, row in enumerate(rows) if not row.done]
                if staying:
                    engine.select(staying)
                    state_BD = state_BD[staying]
                rows = [rows[place] for place in staying]
            if all(row.done for row in rows):
                return
            state_BD = self._pass(rows, state_BD)

    def _pass(self, rows: list[Row], state_BD: Tensor) -> Tensor:
        """One run of the model; the states that led to the rows' last tokens."""
        engine = self.engine
        proposal = Proposal([[] for _ in rows])
        if self.source is not None:
            proposal = self.source.propose(rows, state_BD, engine)
            self.result.drafted += sum(map(len, proposal.tokens))
        tokens_BT = self._tokens(rows, proposal)
        step = engine.enter(tokens_BT)
        hidden_BTD = step.hidden if proposal.hidden is None else proposal.hidden
        normed_BTD = engine.norm(
            engine.through(step, hidden_BTD, proposal.layer, engine.num_layers)
        )
        counts = self._choose(rows, engine.head(normed_BTD), proposal)
        self.result.passes += 1
        engine.keep(counts)
        if self.source is not None:
            self.source.observe(rows, normed_BTD, counts)
        if tokens_BT.shape[1] == 1:
            return normed_BTD[:, 0]
        last = torch.tensor(counts, device=normed_BTD.device) - 1
        return normed_BTD[torch.arange(len(rows), device=last.device), last]

    def _tokens(self, rows: list[Row], proposal: Proposal) -> Tensor:
        """Last tokens and drafts; rows with fewer drafts are filled up, and nobody looks there."""
        longest = max(map(len, proposal.tokens))
        lines = [
            [row.context[-1], *drafts, *[0] * (longest - len(drafts))]
            for row, drafts in zip(rows, proposal.tokens, strict=True)
        ]
        return torch.tensor(lines, device=self.request.ids_BT.device)

    def _choose(self, rows: list[Row], logits_BTV: Tensor, proposal: Proposal) -> list[int]:
        was_done = [row.done for row in rows]
        counts = self.chooser.choose(rows, logits_BTV, proposal.tokens)
        for row, count, ended, drafts in zip(rows, counts, was_done, proposal.tokens, strict=True):
            if ended:
                continue
            emitted = row.tokens[-count:]
            # All that was emitted but the last was a draft; the last is one if it ended the row.
            self.result.accepted += count - 1 + (emitted == drafts[:count])
            self._account(row, count, len(drafts), proposal.flops)
        return counts

    def _account(self, row: Row, count: int, drafts: int, drafting: float) -> None:
        """Every token costs its way through the model, the last also what was guessed in vain."""
        one = self.costs.token(len(row.context)) + self.costs.head
        row.depths += [self.engine.num_layers] * count
        row.flops += [one] * count
        row.flops[-1] += drafting + one * (drafts + 1 - count)
