"""Early exit: a token leaves at the first checked layer whose prediction the policy trusts.

Layers behind that one do not run for it. In a batch, rows that leave are taken out of the deeper
layers' computation and come back with their next token. Unlike speculation this changes what is
generated: how often is a matter of the threshold (`measure/exit_guarantee.py`).

The prompt, and so the first token, runs through all layers.

Shapes: B rows, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepenough.decoding.choosing import Chooser
from deepenough.decoding.costs import Costs
from deepenough.decoding.decode import Generated, run_loop
from deepenough.decoding.engine import Engine
from deepenough.decoding.filling import Walk
from deepenough.decoding.leaving import EarlyExit, ExitTest, Streaks
from deepenough.decoding.request import Request
from deepenough.decoding.rows import Row


def decode_early(engine: Engine, request: Request, early: EarlyExit) -> Generated:
    """Generate with early exits; Ctrl-C ends it with what there is."""
    return run_loop(
        request, lambda chooser, result: EarlyLoop(engine, request, chooser, early, result)
    )


@dataclass
class _Way:
    """How far a row's token went, and what was asked about it on the way."""

    depth: int
    tests: int = 0
    heads: int = 0
    """How often its whole vocabulary was looked at."""


class EarlyLoop:
    """One generation with early exits."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        chooser: Chooser,
        early: EarlyExit,
        result: Generated,
    ) -> None:
        self.engine, self.request, self.chooser = engine, request, chooser
        self.early, self.result = early, result
        self.costs = Costs(engine.adapter)
        self.walk = Walk(engine, early.shortcuts, early.fill)
        self.test = ExitTest(engine, early)
        self.ends = [*sorted(set(early.layers)), engine.num_layers]

    def run(self) -> None:
        request, engine = self.request, self.engine
        rows = list(self.result.rows)
        # Groups of waiting tokens are filled up behind the latest one.
        room = 2 * request.max_length if self.early.fill == "deferred" else request.max_length
        state_BD = engine.prefill(request.ids_BT, request.mask_BT, room + 1)
        ways = [_Way(engine.num_layers, heads=1) for _ in rows]
        self._choose(rows, engine.head(state_BD), ways)
        while not all(row.done for row in rows):
            if not request.in_step and any(row.done for row in rows):
                staying = [place for place, row in enumerate(rows) if not row.done]
                engine.select(staying)
                rows = [rows[place] for place in staying]
            self._pass(rows)
            self.result.passes += 1
            engine.keep([1] * len(rows))

    def _pass(self, rows: list[Row]) -> None:
        engine, last = self.engine, self.engine.num_layers
        device = engine.adapter.model.device
        going = list(range(len(rows)))
        ways = [_Way(last) for _ in rows]
        streaks = Streaks.none(len(rows), device)
        place_B = torch.tensor([len(row.tokens) for row in rows], device=device)
        logits: dict[int, Tensor] = {}
        self.walk.begin(rows)
        for first, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            state_BD = self.walk.climb(rows, going, first, end)
            if end == last:
                logits |= dict(zip(going, engine.head(engine.norm(state_BD)), strict=True))
                for place in going:
                    ways[place].heads += 1
                break
            units = torch.tensor(going, device=device)
            jumped_BD = self.test.jump(end, state_BD)
            answer = self.test.ask(end, jumped_BD, place_B[units], units, streaks)
            leaves = answer.leaves_N.tolist()
            for place, leave, asked in zip(going, leaves, answer.asked_N.tolist(), strict=True):
                ways[place].tests += 1
                ways[place].heads += asked
                ways[place].depth = end if leave else last
            leaving = [place for place, leave in zip(going, leaves, strict=True) if leave]
            if leaving:
                self.walk.leave(rows, leaving, end)
                logits |= dict(zip(leaving, answer.logits, strict=True))
            going = [place for place, leave in zip(going, leaves, strict=True) if not leave]
            if not going:
                break
        self._choose(rows, torch.stack([logits[place] for place in range(len(rows))]), ways)

    def _choose(self, rows: list[Row], logits_BV: Tensor, ways: list[_Way]) -> None:
        ended = [row.done for row in rows]
        self.chooser.choose(rows, logits_BV[:, None], [[] for _ in rows])
        for row, way, was_done in zip(rows, ways, ended, strict=True):
            if not was_done:
                row.depths.append(way.depth)
                row.flops.append(self._flops(row, way))

    def _flops(self, row: Row, way: _Way) -> float:
        """Layers that ran, tests, whole vocabularies, and what fills the skipped layers' slots."""
        total = self.costs.token(len(row.context), 0, way.depth)
        total += way.tests * self.test.flops + way.heads * self.costs.head
        return total + self.costs.filling(way.depth, self.early.fill)
