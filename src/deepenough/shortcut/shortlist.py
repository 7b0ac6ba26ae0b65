"""The head of a language model over a part of its vocabulary, and which part to take.

Projecting to the whole vocabulary is most of what a head costs, and most words of a vocabulary have
next to no probability. `HeadOfWords` gives the logits of some words: the model's own, at the
cost of their rows alone.

The words left out still belong to the softmax. `Shortlist` lets a few of them, drawn anew for every
batch, stand for all: each counts as many times as there are words it stands for, so that the sum
over the vocabulary is right in the mean (sampled softmax, arXiv 1412.2007, the words with most mass
always taken and the others drawn uniformly).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepenough.hf.adapter import Adapter

Head = Callable[[Tensor], Tensor]


class Words(NamedTuple):
    """Some words of the vocabulary, and what to add to their logits before a softmax over them."""

    ids: Tensor
    log_weight: Tensor


class Shortlist:
    """The `size` words with most mass, and `num_drawn` others for the rest of the vocabulary."""

    def __init__(self, mass_V: Tensor, size: int, num_drawn: int) -> None:
        order = mass_V.argsort(descending=True, stable=True)
        self.kept, self.others = order[:size].sort().values, order[size:].sort().values
        self.num_drawn = min(num_drawn, len(self.others))
        self.share = float(mass_V[self.kept].sum() / mass_V.sum())
        """Of the mass, on the words that are always taken."""

    def draw(self, generator: torch.Generator) -> Words:
        drawn = torch.randperm(len(self.others), generator=generator)[: self.num_drawn]
        ids = torch.cat([self.kept, self.others[drawn]])
        log_weight = torch.zeros(len(ids))
        if self.num_drawn:
            log_weight[len(self.kept) :] = math.log(len(self.others) / self.num_drawn)
        return Words(ids, log_weight)


class HeadOfWords:
    """`adapter.head(...)[..., ids]`, without making the other columns if the model allows that."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._is_divisible = _is_divisible(adapter)

    def __call__(self, ids: Tensor) -> Head:
        small = _small_adapter(self.adapter, ids) if self._is_divisible else None
        if small is not None:
            return small.head
        return lambda normed: self.adapter.head(normed)[..., ids]


def _small_adapter(adapter: Adapter, ids: Tensor) -> Adapter | None:
    """The same model, weights shared, but for fewer rows in the last map of its head."""
    model = adapter.model
    last_map = model.get_output_embeddings()
    paths = [name for name, module in model.named_modules() if module is last_map]
    if not isinstance(last_map, nn.Linear) or not paths:
        return None
    rows = copy.copy(last_map)
    rows._parameters = {
        name: None if value is None else nn.Parameter(value[ids], requires_grad=False)
        for name, value in last_map._parameters.items()
    }
    small = copy.copy(adapter)
    small.model = copy.copy(model)
    if adapter.trunk is model:
        small.trunk = small.model
    parent: nn.Module = small.model
    *way, last = paths[0].split(".")
    for name in way:
        child = copy.copy(getattr(parent, name))
        parent._modules = {**parent._modules, name: child}
        parent = child
    parent._modules = {**parent._modules, last: rows}
    return small


@torch.no_grad()
def _is_divisible(adapter: Adapter) -> bool:
    """Heads that use their last map in an unusual way are found out by trying."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, adapter.width, generator=generator).to(adapter.model.device)
    normed = adapter.final_norm(state)
    expected = adapter.head(normed)
    ids = torch.arange(0, expected.shape[-1], 7, device=expected.device)
    small = _small_adapter(adapter, ids)
    if small is None:
        return False
    try:
        found = small.head(normed)
    except (RuntimeError, IndexError, AttributeError):
        return False
    wanted = expected[..., ids]
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
