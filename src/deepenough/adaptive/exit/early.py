"""Early exit: a token leaves at the first checked layer whose prediction the policy trusts.

Layers behind that one do not run for it. In a batch, rows that leave are taken out of the deeper
layers' computation and come back with their next token. Unlike speculation this changes what is
generated: how often is a matter of the threshold (`measure/exit_guarantee.py`).

The test is made on a shortlist of words where one is given; a token that leaves is then chosen with
the whole head. The prompt, and so the first token, runs through all layers.

Shapes: B rows, D width, S shortlist, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.adaptive.exit.carry import shortlist_head
from deepenough.adaptive.exit.choosing import Chooser
from deepenough.adaptive.exit.costs import Costs
from deepenough.adaptive.exit.decode import Generated, run_loop
from deepenough.adaptive.exit.engine import Engine
from deepenough.adaptive.exit.filling import FILLS, Fill, Walk
from deepenough.adaptive.exit.fused import FusedEngine
from deepenough.adaptive.exit.policies import ExitPolicy, Look
from deepenough.adaptive.exit.request import Request
from deepenough.adaptive.exit.rows import Row
from deepenough.adaptive.shortcut.shortcuts import Shortcuts
from deepenough.errors import UserError


@dataclass
class EarlyExit:
    """Where tokens may leave, who decides, and what stays behind."""

    shortcuts: Shortcuts
    policy: ExitPolicy
    layers: Sequence[int]
    """Layers after which exits are checked."""
    fill: Fill = "shortcut"
    shortlist: Tensor | None = None
    """Words on which the test is made; None for all."""
    map_mode: str | None = None
    """Maps to the last layer: None as fitted, "tuned", or "id" for none."""

    def check(self, engine: Engine) -> FusedEngine:
        """Refuse what cannot be done; the engine that does the rest."""
        last = engine.num_layers
        if not isinstance(engine, FusedEngine):
            raise UserError(
                f"{type(engine.adapter.model).__name__} cannot leave early: that needs layers "
                'written out here, as for Llama, Mistral, Qwen 2 and GPT-2; use mode="speculative".'
            )
        if not self.layers or not all(0 < layer < last for layer in self.layers):
            raise UserError(
                f"Exits are checked after some of the layers 1 to {last - 1}: got "
                f"{list(self.layers)}."
            )
        if self.fill not in FILLS:
            raise UserError(f"The cache is filled by {', '.join(FILLS)}, not by {self.fill!r}.")
        if self.fill == "shortcut" and self.shortcuts.targets != "all":
            raise UserError(
                "Shortcuts to the last layer alone cannot fill the cache: fit them with "
                'targets="all", or fill by copy or deferred.'
            )
        return engine


def decode_early(engine: Engine, request: Request, early: EarlyExit) -> Generated:
    """Generate with early exits; Ctrl-C ends it with what there is."""
    able = early.check(engine)
    return run_loop(
        request, lambda chooser, result: EarlyLoop(able, request, chooser, early, result)
    )


class EarlyLoop:
    """One generation with early exits."""

    def __init__(
        self,
        engine: FusedEngine,
        request: Request,
        chooser: Chooser,
        early: EarlyExit,
        result: Generated,
    ) -> None:
        self.engine, self.request, self.chooser = engine, request, chooser
        self.early, self.result = early, result
        self.costs = Costs(engine.adapter)
        self.walk = Walk(engine, early.shortcuts, early.fill)
        words = early.shortlist
        device = engine.adapter.model.device
        self.words = None if words is None else shortlist_head(engine.adapter, words.to(device))

    def run(self) -> None:
        request, engine = self.request, self.engine
        rows = list(self.result.rows)
        # Groups of waiting tokens are filled up behind the latest one.
        room = 2 * request.max_length if self.early.fill == "deferred" else request.max_length
        state_BD = engine.prefill(request.ids_BT, request.mask_BT, room + 1)
        self._choose(rows, engine.head(state_BD), [engine.num_layers] * len(rows))
        while not all(row.done for row in rows):
            if not request.in_step and any(row.done for row in rows):
                staying = [place for place, row in enumerate(rows) if not row.done]
                engine.select(staying)
                rows = [rows[place] for place in staying]
            self._pass(rows)
            self.result.passes += 1
            engine.keep([1] * len(rows))

    def _pass(self, rows: list[Row]) -> None:
        engine, early = self.engine, self.early
        last = engine.num_layers
        going = list(range(len(rows)))
        depths = [last] * len(rows)
        streaks = [(-1, 0)] * len(rows)
        logits: dict[int, Tensor] = {}
        self.walk.begin(rows)
        ends = [*sorted(set(early.layers)), last]
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            state_BD = self.walk.climb(rows, going, first, end)
            if end == last:
                normed_BD = engine.norm(state_BD)
                logits |= dict(zip(going, engine.head(normed_BD), strict=True))
                break
            jumped = early.shortcuts.apply(state_BD, end, last, early.map_mode)
            normed_BD = engine.norm(jumped)
            leaves = self._leaves(rows, going, end, normed_BD, streaks)
            leaving = [place for place, leave in zip(going, leaves, strict=True) if leave]
            if leaving:
                self.walk.leave(rows, leaving, end)
                chosen = normed_BD[torch.tensor(leaves, device=normed_BD.device)]
                logits |= dict(zip(leaving, engine.head(chosen), strict=True))
            for place in leaving:
                depths[place] = end
            going = [place for place, leave in zip(going, leaves, strict=True) if not leave]
            if not going:
                break
        self._choose(rows, torch.stack([logits[place] for place in range(len(rows))]), depths)

    def _leaves(
        self,
        rows: list[Row],
        going: list[int],
        layer: int,
        normed_BD: Tensor,
        streaks: list[tuple[int, int]],
    ) -> list[bool]:
        engine = self.engine
        scores = engine.head(normed_BD) if self.words is None else F.linear(normed_BD, *self.words)
        probabilities_BS = scores.float().softmax(-1)
        best = probabilities_BS.argmax(-1).tolist()
        for place, word in zip(going, best, strict=True):
            before, count = streaks[place]
            streaks[place] = (word, count + 1 if word == before else 1)
        device = probabilities_BS.device
        look = Look(
            layer,
            probabilities_BS,
            torch.tensor([len(rows[place].tokens) for place in going], device=device),
            torch.tensor([streaks[place][1] for place in going], device=device),
        )
        return self.early.policy.leaves(look).tolist()

    def _choose(self, rows: list[Row], logits_BV: Tensor, depths: list[int]) -> None:
        ended = [row.done for row in rows]
        self.chooser.choose(rows, logits_BV[:, None], [[] for _ in rows])
        for row, depth, was_done in zip(rows, depths, ended, strict=True):
            if not was_done:
                row.depths.append(depth)
                row.flops.append(self._flops(row, depth))

    def _flops(self, row: Row, depth: int) -> float:
        """Layers that ran, tests on the way, the head, and what fills the skipped layers' slots."""
        engine, last = self.engine, self.engine.num_layers
        width = engine.adapter.width
        words = self.costs.head if self.words is None else 2.0 * self.words[0].numel()
        tests = sum(layer <= depth and layer < last for layer in set(self.early.layers))
        total = self.costs.token(len(row.context), 0, depth) + self.costs.head
        total += tests * (2.0 * width * width + words)
        if self.early.fill == "deferred":
            return total
        filled = 2.0 * width * 2 * engine.key_heads * engine.head_width
        mapped = 2.0 * width * width if self.early.fill == "shortcut" else 0.0
        return total + (last - depth) * (filled + mapped)
