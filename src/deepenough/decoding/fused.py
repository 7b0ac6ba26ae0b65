"""The lean path: layers as few large operations, for layouts whose arithmetic is written out here.

Against the model's own layers this saves what is not arithmetic: maps that read the same input are
one product, products add to the residual stream themselves, the cache is never copied, masks and
position codes are made once a step, and attention is a single kernel. Weights are not held twice:
`join` lays the matrices of one input side by side and makes the model's own parameters views of
the result.

Shapes: B rows, T tokens, D width, H heads, K width of a head, N = B * T.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.decoding.engine import Engine, Step, row_lengths
from deepenough.decoding.slots import NO_SLOTS, Place, Slots, attend
from deepenough.hf.adapter import Adapter


class FusedEngine(Engine):
    """What the layouts share: slots, and attention over them."""

    slots: Slots = NO_SLOTS

    def __init__(self, adapter: Adapter, heads: int, key_heads: int, head_width: int) -> None:
        super().__init__(adapter)
        self.heads, self.key_heads, self.head_width = heads, key_heads, head_width
        self.groups = heads // key_heads
        self.refresh()

    # -- what a layout says ------------------------------------------------------------------

    @abstractmethod
    def embed(self, tokens_BT: Tensor, place: Place) -> Tensor:
        """`h_0` of tokens at their positions."""

    def code(self, place: Place, like: Tensor) -> None:
        """Give a place its position codes, where the layers apply any."""

    @abstractmethod
    def layer(self, index: int, hidden_ND: Tensor, step: Step) -> Tensor:
        """One layer, of hidden states `[N, D]`."""

    @abstractmethod
    def fill(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Keys and values of a layer alone, from what it would read."""

    # -- Engine ------------------------------------------------------------------------------

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        lengths = row_lengths(ids_BT, mask_BT)
        batch, width = ids_BT.shape
        if mask_BT is not None:
            # Every row begins in its first slot; padding goes behind it, where nobody looks.
            order = mask_BT.bool().int().argsort(dim=1, descending=True, stable=True)
            ids_BT = ids_BT.gather(1, order)
        dtype, device = self.adapter.model.dtype, ids_BT.device
        shape = (batch, self.key_heads, max(capacity, width), self.head_width)
        self.slots = Slots(self.num_layers, shape, dtype, device)
        self.lengths = [0] * batch
        step = self.enter(ids_BT)
        hidden_BTD = self.through(step, step.hidden, 0, self.num_layers)
        self.lengths = lengths
        self.prompt = [row[:length] for row, length in zip(hidden_BTD, lengths, strict=True)]
        last = torch.tensor(lengths, device=device) - 1
        return self.norm(hidden_BTD[torch.arange(batch, device=device), last])

    def enter(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        starts = [length + offset for length in self.lengths]
        model = self.adapter.model
        place = Place(starts, tokens_BT.shape[1], self.groups, model.dtype, str(model.device))
        step = Step(self.embed(tokens_BT, place), offset, place)
        self.code(place, step.hidden)
        return step

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """States of tokens at `starts` and after, of some rows, on their way to further layers."""
        model = self.adapter.model
        subset = None if len(rows) == len(self.lengths) else rows
        tokens = hidden_BTD.shape[1]
        place = Place(starts, tokens, self.groups, model.dtype, str(model.device), subset)
        self.code(place, hidden_BTD)
        return Step(hidden_BTD, 0, place)

    def through(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        hidden = hidden_BTD.flatten(0, 1)
        for index in range(first, last):
            hidden = self.layer(index, hidden, step)
        return hidden.view(hidden_BTD.shape)

    def keep(self, counts: Sequence[int]) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self.slots.select(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def release(self) -> None:
        self.slots, self.lengths, self.prompt = NO_SLOTS, [], []

    # -- attention ---------------------------------------------------------------------------

    def attend(
        self,
        index: int,
        step: Step,
        query_BTHK: Tensor,
        key_BTHK: Tensor,
        value_BTHK: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of a layer over its slots, these tokens' included; `[N, H * K]`."""
        slots = self.slots.keys[index], self.slots.values[index]
        return attend(step.context, slots, query_BTHK, key_BTHK, value_BTHK, scale)


class LinearMap:
    """`x W + b` of states `[N, D]`, as one operation; `W` is a view of a module's own matrix."""

    def __init__(self, weight_DE: Tensor, bias_E: Tensor | None) -> None:
        self.weight, self.bias = weight_DE, bias_E

    def __call__(self, states_ND: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(states_ND, self.weight)
        return torch.addmm(self.bias, states_ND, self.weight)

    def added(self, residual_NE: Tensor, states_ND: Tensor) -> Tensor:
        """The residual with the map of the states on top."""
        summed = torch.addmm(residual_NE, states_ND, self.weight)
        return summed if self.bias is None else summed.add_(self.bias)

    def rows(self, first: int) -> LinearMap:
        """The map to all outputs from `first` on."""
        return LinearMap(self.weight[:, first:], None if self.bias is None else self.bias[first:])


def join(modules: Sequence[nn.Linear]) -> LinearMap:
    """The maps as one, whose outputs the modules' own parameters become views of."""
    weights: list[Any] = [module.weight for module in modules]
    biases: list[Any] = [module.bias for module in modules if module.bias is not None]
    joined = _laid_together(biases) if len(biases) == len(modules) else None
    return LinearMap(_laid_together(weights).t(), joined)


def _laid_together(parts: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all parts; the same as last time if they are views of one already."""
    first, address = parts[0].detach(), parts[0].data_ptr()
    together = True
    for part in parts:
        together = together and part.is_contiguous() and part.data_ptr() == address
        address += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    storage = first.untyped_storage()
    together = together and address <= storage.data_ptr() + storage.nbytes()
    if together:
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
