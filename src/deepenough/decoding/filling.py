"""Tokens that leave early, and the keys and values they owe to the layers they skip.

Later tokens look back at every layer, also at those an earlier token did not run. Three ways to
have something there:

- `shortcut`: layer `j` gets keys and values from `A_(l->j) h_l`, the state that the shortcut says
  it would have read;
- `copy`: from `h_l` itself (Confident Adaptive Language Modeling, arXiv 2207.07061);
- `deferred`: nothing, until a later token of the row goes deeper: then both go, in one pass, and
  the keys and values are exact.

Deferred tokens wait where they left, oldest deepest: whoever comes by takes along all that wait
there. They are neighbours, so a group on its way is always a run of tokens up to the latest.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepenough.decoding.engine import Engine, Step
from deepenough.decoding.rows import Row
from deepenough.shortcut.modeling import Shortcuts

Fill = Literal["shortcut", "copy", "deferred"]
FILLS: tuple[Fill, ...] = ("shortcut", "copy", "deferred")


class Walk:
    """All rows' latest tokens on their way up, row by row as far as it goes."""

    def __init__(self, engine: Engine, shortcuts: Shortcuts, fill: Fill) -> None:
        self.engine, self.shortcuts, self.fill = engine, shortcuts, fill
        self.waiting: dict[int, dict[int, Tensor]] = {}
        """By row and layer: states `[n, D]` of tokens that wait there."""
        self.moving: list[Tensor] = []
        """Of each row, the states on their way; the last is the latest token's."""
        self.contexts: dict[tuple[int, ...], Any] = {}
        """What layers need for the latest tokens of some rows."""

    def begin(self, rows: Sequence[Row]) -> None:
        """The latest token of every row enters."""
        device = self.engine.adapter.model.device
        tokens_B1 = torch.tensor([[row.context[-1]] for row in rows], device=device)
        step = self.engine.enter(tokens_B1)
        self.moving = list(step.hidden)
        self.contexts = {tuple(range(len(rows))): step.context}

    def climb(self, rows: Sequence[Row], places: Sequence[int], first: int, last: int) -> Tensor:
        """Run layers `first + 1 ... last` for some rows; the latest tokens' states, `[n, D]`."""
        for place in places:
            waited = self.waiting.get(rows[place].number, {}).pop(first, None)
            if waited is not None:
                self.moving[place] = torch.cat([waited, self.moving[place]])
        if any(len(self.moving[place]) > 1 for place in places):
            return self._climb_together(places, first, last)
        step = self._alone(places)
        hidden_B1D = self.engine.through(step, step.hidden, first, last)
        for place, state_1D in zip(places, hidden_B1D, strict=True):
            self.moving[place] = state_1D
        return hidden_B1D[:, 0]

    def _climb_together(self, places: Sequence[int], first: int, last: int) -> Tensor:
        """The same where some rows have tokens with them that had waited."""
        engine = self.engine
        groups = [self.moving[place] for place in places]
        sizes = [len(group) for group in groups]
        starts = [engine.lengths[p] + 1 - n for p, n in zip(places, sizes, strict=True)]
        # What fills up shorter groups lands behind the latest token, where nobody looks.
        hidden_BTD = pad_sequence(groups, batch_first=True)
        step = engine.resume(hidden_BTD, starts, places)
        hidden_BTD = engine.through(step, hidden_BTD, first, last)
        for place, size, states_TD in zip(places, sizes, hidden_BTD, strict=True):
            self.moving[place] = states_TD[:size]
        return torch.stack([self.moving[place][-1] for place in places])

    def _alone(self, places: Sequence[int]) -> Step:
        """The latest tokens of some rows; masks and codes are made once for the same rows."""
        hidden_B1D = torch.stack([self.moving[place] for place in places])
        chosen = tuple(places)
        if chosen not in self.contexts:
            starts = [self.engine.lengths[place] for place in places]
            self.contexts[chosen] = self.engine.resume(hidden_B1D, starts, places).context
        return Step(hidden_B1D, 0, self.contexts[chosen])

    def leave(self, rows: Sequence[Row], places: Sequence[int], layer: int) -> None:
        """These rows' tokens go no further than `layer`."""
        engine = self.engine
        if self.fill == "deferred":
            for place in places:
                waits = self.waiting.setdefault(rows[place].number, {})
                before = waits.get(layer)
                group = self.moving[place]
                waits[layer] = group if before is None else torch.cat([before, group])
            return
        step = self._alone(places)
        left_BD = step.hidden[:, 0]
        for index in range(layer, engine.num_layers):
            copied = self.fill == "copy"
            read_BD = left_BD if copied else self.shortcuts.apply(left_BD, layer, index)
            engine.fill(index, read_BD, step)
