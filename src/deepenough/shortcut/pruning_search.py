"""The search for what to replace in a model, and whole layers dropped as others do it.

What is chosen is decided by what it does to the output. With `p` the output distribution of the
full model and `q` that of a pruned one, each on held-out text, a step of the greedy search takes
the replacement with the smallest

    increase of KL(p || q) / cost that it saves

until the layers cost no more than the budget. Increases mostly grow as more is replaced, so an old
one is a lower bound, and so is that of a linear map for the removal of the same part: only
replacements that look best are measured, first on a little text, then on more (lazy greedy). At the
end, what was replaced early is exchanged for something else where the KL falls by that.
Parts without which little works, such as those that make massive activations, are never chosen:
they are measured, and their KL is large.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from deepenough.errors import UserError
from deepenough.shortcut.pruning_costs import Costs
from deepenough.shortcut.replaceable import (
    PARTS,
    Block,
    Choice,
    Mode,
    ReplaceableModel,
    first_of_each_kind,
)
from deepenough.shortcut.submodules import Place

_SCREENED = 512
"""Tokens on which replacements are first tried one by one."""
_MEASURED = 1_536
"""Tokens on which those that look best are measured."""
_TRIED = 6
"""Exchanges that are measured before the search ends."""

Item = tuple[Place | Block, Mode]
"""One replacement."""


class Move(NamedTuple):
    """A choice that is one replacement further."""

    item: Item
    choice: Choice
    layer: int
    """The first layer that differs."""


def moves(whole: ReplaceableModel, choice: Choice) -> Iterator[Move]:
    """Yield the choices that are one replacement further."""
    protected = first_of_each_kind(whole.adapter)
    modes: tuple[Mode, ...] = ("linear", "removed")
    for place in whole.chains:
        kind, layer, _ = place
        if kind not in PARTS or choice.in_run(layer):
            continue
        if kind == "attention" and layer in protected:
            continue
        for mode in modes:
            if place in whole.maps and choice.parts.get(place) not in (mode, "removed"):
                yield Move((place, mode), choice.with_part(place, mode), layer)
    for run in whole.maps:
        if not isinstance(run, Block) or any(map(choice.in_run, range(*run))):
            continue
        if protected.isdisjoint(range(*run)):
            yield Move((run, "linear"), choice.with_run(run), run.first)


class GreedySearch:
    """The greedy search, with what single replacements are known to do."""

    def __init__(
        self,
        whole: ReplaceableModel,
        costs: Costs,
        budget: float,
        start: Choice | None = None,
        progress: Callable[[Choice, float], None] | None = None,
    ) -> None:
        """Begin from a choice, if one is given; `progress` hears of every step."""
        self.whole, self.costs, self.budget, self.progress = whole, costs, budget, progress
        self.current = start or Choice()
        whole.settle(self.current)
        self.reached = whole.divergence(self.current, tokens=_MEASURED) if start else 0.0
        self.estimates: dict[Item, float] = dict(whole.singles)
        """By how much a replacement raised the KL when it was last measured."""
        for place in self.current.parts:
            self._forget(place)

    def run(self) -> Choice:
        """Return the choice that the search ends with, at most the budget in cost."""
        while self.costs.of(self.current) > self.budget:
            self._step()
        tried: set[tuple[Item, Item]] = set()
        while self._exchange(tried):
            pass
        return self.current

    def _take(self, choice: Choice, layer: int, kl: float) -> None:
        self.current, self.reached = choice, kl
        self.whole.settle(choice, layer)
        if self.progress is not None:
            self.progress(choice, kl)

    def _forget(self, place: Place | Block) -> None:
        """Forget what replacing a part did: from a linear map on, removing it does less."""
        for mode in ("linear", "removed"):
            self.estimates.pop((place, mode), None)

    def _screen(self, move: Move) -> None:
        """Measure the increase of KL by a replacement on a little text."""
        before = self._little_reached()
        kl = self.whole.divergence(move.choice, move.layer, _SCREENED)
        self.estimates[move.item] = kl - before
        if self.current == Choice():
            self.whole.singles[move.item] = kl

    def _little_reached(self) -> float:
        """Return the KL of the present choice on the text for screening."""
        if self.current == Choice():
            return 0.0
        return self.whole.divergence(self.current, self.whole.adapter.num_layers - 1, _SCREENED)

    def _step(self) -> None:
        """Take the replacement with the smallest increase of KL for the cost that it saves."""
        cost = self.costs.of(self.current)
        queue = []
        for order, move in enumerate(moves(self.whole, self.current)):
            saved = min(cost - self.costs.of(move.choice), cost - self.budget)  # no more counts
            if saved > 0:
                queue.append((self._least(move.item) / saved, order, move, saved))
        if not queue:
            raise UserError(
                f"The layers cannot cost less than {cost / self.costs.of(Choice()):.2f} of what "
                "they do: ask to keep more."
            )
        heapq.heapify(queue)
        measured: dict[Item, float] = {}
        while (best := queue[0][2]).item not in measured:
            ratio, order, move, saved = queue[0]
            if move.item in self.estimates:
                kl = self.whole.divergence(move.choice, move.layer, _MEASURED)
                self.estimates[move.item] = kl - self.reached
                measured[move.item] = kl
            elif self._least(move.item) / saved <= ratio:
                self._screen(move)
            heapq.heapreplace(queue, (self._least(move.item) / saved, order, move, saved))
        self._forget(best.item[0])
        self._take(best.choice, best.layer, measured[best.item])

    def _least(self, item: Item) -> float:
        """Return the increase of KL by a replacement when last measured, or a lower bound of it."""
        return self.estimates.get(item, self.estimates.get((item[0], "linear"), 0.0))

    def _exchange(self, tried: set[tuple[Item, Item]]) -> bool:
        """Exchange one replacement for another where the KL falls; return whether one was.

        Of every one the gain of undoing it is measured on a little text. With the known increases
        of others, which are lower bounds, that says which exchanges are worth a measurement.
        """
        if len(tried) >= _TRIED:
            return False
        before = self._little_reached()
        pairs: list[tuple[float, int, Move, Move]] = []
        for undone in _undone(self.current):
            gain = before - self.whole.divergence(undone.choice, undone.layer, _SCREENED)
            for move in moves(self.whole, undone.choice):
                known = self.estimates.get(move.item)
                is_new = move.item != undone.item and (undone.item, move.item) not in tried
                if known is not None and is_new and self.costs.of(move.choice) <= self.budget:
                    pairs.append((known - gain, len(pairs), undone, move))
        for promised, _, undone, move in sorted(pairs)[: _TRIED - len(tried)]:
            if promised >= 0:
                break
            tried.add((undone.item, move.item))
            layer = min(undone.layer, move.layer)
            kl = self.whole.divergence(move.choice, layer, _MEASURED)
            if kl < self.reached:
                self._take(move.choice, layer, kl)
                return True
        return False


def _undone(choice: Choice) -> Iterator[Move]:
    """Yield the choices that are one replacement less."""
    for place, mode in choice.parts.items():
        parts = {p: m for p, m in choice.parts.items() if p != place}
        yield Move((place, mode), replace(choice, parts=parts), place[1])
    for run in choice.runs:
        runs = tuple(each for each in choice.runs if each != run)
        yield Move((run, "linear"), replace(choice, runs=runs), run.first)


@torch.no_grad()
def drop(whole: ReplaceableModel, costs: Costs, budget: float, method: str) -> Choice:
    """Return the choice of whole layers to remove, as others do it.

    "influence" removes the layers that change the direction of states least, one by one (ShortGPT,
    arXiv 2403.03853); "contiguous" the run of layers whose ends lie closest by angle (arXiv
    2403.17887).
    """
    states = whole.usual_states()
    num_layers = whole.adapter.num_layers
    protected = first_of_each_kind(whole.adapter)
    free = [layer for layer in range(num_layers) if layer not in protected]

    def distance(first: int, end: int) -> float:
        cosine = nn.functional.cosine_similarity(states[first], states[end], dim=-1)
        return float(cosine.clamp(-1, 1).acos().mean())

    def removed(layers: Iterable[int]) -> Choice:
        places = [(kind, layer, 0) for layer in layers for kind in PARTS]
        return Choice(dict.fromkeys(places, "removed"))

    by_influence = sorted(free, key=lambda layer: distance(layer, layer + 1))
    for count in range(len(free) + 1):
        if method == "influence":
            found = removed(by_influence[:count])
        else:
            firsts = [
                i
                for i in range(num_layers - count + 1)
                if protected.isdisjoint(range(i, i + count))
            ]
            best = min(firsts, key=lambda i: distance(i, i + count)) if count else 0
            found = removed(range(best, best + count))
        if costs.of(found) <= budget:
            return found
    raise UserError(
        f"The layers cannot cost less than {costs.of(found) / costs.of(Choice()):.2f} of what they "
        "do: ask to keep more."
    )
