"""What the parts of a model's layers cost: measured time of a token, weights, or FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from deepenough.hf.adapter import kind_of
from deepenough.hf.intercept import eval_mode
from deepenough.shortcut.normal_equations import AffineMap
from deepenough.shortcut.reading import TokenBatch
from deepenough.shortcut.replaceable import PARTS, Choice, ReplaceableModel, unchanged
from deepenough.shortcut.submodules import Function, Place

_DECODED = 64
"""Length of the text after which the time of one more token is measured."""


@dataclass(frozen=True)
class Costs:
    """What the layers cost, in the unit of the budget."""

    parts: Mapping[Place, float]
    linear: float
    """A linear map in the place of a part."""
    rest: Sequence[float]
    """What a layer costs beside its two parts."""

    def of(self, choice: Choice) -> float:
        """Return the cost of all layers."""
        cost = self.linear * len(choice.runs)
        for layer, rest in enumerate(self.rest):
            if not choice.in_run(layer) and not choice.is_dropped(layer):
                cost += rest + sum(self._part(choice, (kind, layer, 0)) for kind in PARTS)
        return cost

    def _part(self, choice: Choice, place: Place) -> float:
        mode = choice.parts.get(place)
        return {"linear": self.linear, "removed": 0.0}.get(mode or "", self.parts[place])

    def left(self, choice: Choice) -> list[list[float]]:
        """Return what every layer's attention and feed-forward cost, as shares of what they did."""
        rows = []
        for layer in range(len(self.rest)):
            places = [(kind, layer, 0) for kind in PARTS]
            if choice.in_run(layer):
                run = next(run for run in choice.runs if run.first <= layer < run.end)
                before = sum(self.parts[p] for p in self.parts if run.first <= p[1] < run.end)
                rows.append([self.linear / max(before, 1e-30)] * 2)
            else:
                rows.append([self._part(choice, p) / max(self.parts[p], 1e-30) for p in places])
        return rows


def find_costs(whole: ReplaceableModel, budget: str) -> Costs:
    """Return what the parts of the layers cost: measured time, weights, or FLOPs of a token."""
    adapter = whole.adapter
    chains = {place: chain for place, chain in whole.chains.items() if place[0] in PARTS}
    weights = {place: float(_num_weights(chain)) for place, chain in chains.items()}
    linear = float(adapter.width * (adapter.width + 1))
    num_layers = adapter.num_layers
    if budget == "weights":
        rest = [
            _num_weights([layer]) - sum(weights[kind, number, 0] for kind in PARTS)
            for number, layer in enumerate(adapter.layers)
        ]
        return Costs(weights, linear, rest)
    if budget == "flops":
        attended = 4.0 * _DECODED * adapter.width
        flops = {p: 2 * num + attended * (p[0] == "attention") for p, num in weights.items()}
        return Costs(flops, 2 * linear, [0.0] * num_layers)
    parameter = next(adapter.model.parameters())

    def some_map() -> AffineMap:  # one of its own for every place, as the memory has it
        width = adapter.width
        return AffineMap(parameter.new_zeros(width, width), parameter.new_zeros(width))

    places = {kind: [(kind, layer, 0) for layer in range(1, num_layers)] for kind in PARTS}
    variants: dict[str, tuple[dict[Place, Function], dict[int, Function]]] = {"full": ({}, {})}
    for kind, own in places.items():
        variants[f"{kind} linear"] = {place: some_map() for place in own}, {}
        variants[f"{kind} removed"] = dict.fromkeys(own, torch.zeros_like), {}
    both = [place for own in places.values() for place in own]
    variants["both removed"] = dict.fromkeys(both, torch.zeros_like), {}
    variants["no layers"] = {}, dict.fromkeys(range(1, num_layers), unchanged)
    model, replacement = adapter.model, whole.replacement
    seconds = token_seconds(
        {name: (model, partial(replacement.placed, *own)) for name, own in variants.items()},
        whole.held_out,
    )
    times: dict[Place, float] = {}
    for kind, own in places.items():
        # Parts of one kind share the time of all of them by their weights.
        total = sum(weights[place] for place in own)
        saved = max(0.0, seconds["full"] - seconds[f"{kind} removed"])
        times |= {p: saved * num / total for p, num in weights.items() if p[0] == kind}
    maps = [seconds[f"{kind} linear"] - seconds[f"{kind} removed"] for kind in PARTS]
    beside = max(0.0, seconds["both removed"] - seconds["no layers"]) / (num_layers - 1)
    return Costs(times, max(0.0, sum(maps) / (2 * (num_layers - 1))), [beside] * num_layers)


@torch.no_grad()
def token_seconds(
    variants: Mapping[str, tuple[Any, Callable[[], AbstractContextManager[None]]]],
    texts: Sequence[TokenBatch],
    rounds: int = 5,
    steps: int = 6,
) -> dict[str, float]:
    """Return the seconds of one more token after a text, by variant: the best of several rounds.

    A variant is a model and what it runs in. Models that do not decode read a batch of texts.
    """
    longest = min(
        getattr(model.config.get_text_config(), "max_position_embeddings", None) or _DECODED + steps
        for model, _ in variants.values()
    )
    length = max(1, min(_DECODED, longest - steps))
    ids = torch.cat([batch.ids.flatten() for batch in texts])[None, :length]
    found = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, (model, context) in variants.items():
            with eval_mode(model), context():
                own: dict[str, Any] = {"input_ids": texts[0].ids, "attention_mask": texts[0].mask}
                if kind_of(model) == "causal":
                    cache = model(input_ids=ids.to(model.device), use_cache=True).past_key_values
                    own = {"input_ids": ids[:, -1:], "past_key_values": cache}
                for tensor in ("input_ids", "attention_mask"):
                    own |= {tensor: own[tensor].to(model.device)} if tensor in own else {}
                for _ in range(steps):
                    started = time.perf_counter()
                    model(**own)
                    found[name] = min(found[name], time.perf_counter() - started)
    return found


def _num_weights(modules: Iterable[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())
