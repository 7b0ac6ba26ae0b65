"""The general path: the model's own layers, called one by one, over a cache allocated once.

What the layers are called with (masks, position codes, the cache) the model makes itself: its trunk
is entered, and left by an exception at the door of the first layer, whose arguments then serve all
layers. So this holds for every architecture whose layers are all called alike, which `agrees`
(`engine.py`) makes sure of before anything is decoded.

Rows are aligned on the right, as transformers pads prompts: where some keep fewer tokens than
others, they are moved.

A layer whose keys and values alone are wanted is left by an exception as well, at the moment it
hands them to the cache: neither its attention nor its feed-forward runs.

Shapes: B rows, T tokens, D width, H heads, C slots, K width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from deepenough.decoding.engine import Engine, Step, row_lengths
from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import hidden_input, hidden_output, this_thread_only


class _Call(NamedTuple):
    """What all layers are called with, and for which rows of the cache; None for all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: Tensor | None = None


class GeneralEngine(Engine):
    takes_groups = False

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        parameters = inspect.signature(adapter.trunk.forward).parameters
        self._takes_positions = "position_ids" in parameters
        limit = adapter.max_length
        self._last_position = None if limit is None else limit - 1
        self._cache = _Slots([], 0)
        self._entered = torch.empty(0)
        self._calls: dict[tuple[int, ...], _Call] = {}

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        lengths = row_lengths(ids_BT, mask_BT)
        width = max(lengths)
        if mask_BT is not None:
            order = mask_BT.bool().int().argsort(dim=1, stable=True)  # padding to the left
            ids_BT = ids_BT.gather(1, order)[:, -width:]
        self._cache = _Slots(self.adapter.layers[: self.num_layers], max(capacity, width))
        self.lengths = lengths
        step = self._step(ids_BT, self._mask(), [length - width for length in lengths])
        hidden_BTD = self.through(step, step.hidden, 0, self.num_layers)
        self._cache.settle(width)
        self.prompt = [row[-length:] for row, length in zip(hidden_BTD, lengths, strict=True)]
        return self.norm(hidden_BTD[:, -1])

    def _mask(self, more: int = 0) -> Tensor | None:
        """Which slots each row has filled, `more` tokens included; None if all have all."""
        width = max(self.lengths)
        if min(self.lengths) == width:
            return None
        device = self.adapter.model.device
        starts = width - torch.tensor(self.lengths, device=device)
        return (torch.arange(width + more, device=device) >= starts[:, None]).long()

    def enter(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        starts = [length + offset for length in self.lengths]
        step = self._step(tokens_BT, self._mask(offset + tokens_BT.shape[1]), starts, offset)
        self._entered, self._calls = tokens_BT, {tuple(range(len(tokens_BT))): step.context}
        return step

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Only the tokens that entered last can: masks and codes are made anew for their rows."""
        chosen = tuple(rows)
        if chosen not in self._calls:
            index = torch.tensor(rows, device=hidden_BTD.device)
            mask_BC = self._mask(1)
            mask_BC = None if mask_BC is None else mask_BC[index]
            call = self._step(self._entered[index], mask_BC, list(starts)).context
            self._calls[chosen] = call._replace(rows=index)
        return Step(hidden_BTD, 0, self._calls[chosen])

    def _step(
        self, tokens_BT: Tensor, mask_BC: Tensor | None, starts: list[int], offset: int = 0
    ) -> Step:
        """What the trunk would give to its first layer."""
        self._cache.stand(offset)
        given: dict[str, Any] = {"attention_mask": mask_BC}
        if self._takes_positions:
            steps = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            positions = steps + torch.tensor(starts, device=tokens_BT.device)[:, None]
            # Padding has no position, and guesses may reach beyond the last; nobody reads either.
            given["position_ids"] = positions.clamp(0, self._last_position)

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _AtTheDoor(args, kwargs)

        handle = self.adapter.layers[0].register_forward_pre_hook(
            this_thread_only(stop), with_kwargs=True
        )
        try:
            self.adapter.trunk(
                input_ids=tokens_BT, past_key_values=self._cache, use_cache=True, **given
            )
            raise RuntimeError("the trunk did not reach its first layer")
        except _AtTheDoor as door:
            args, kwargs = door.args
        finally:
            handle.remove()
        hidden = hidden_input(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if value is not hidden}
        return Step(hidden, offset, _Call(args[1:], rest))

    def through(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        call: _Call = step.context
        self._cache.stand(step.offset, call.rows)
        for layer in self.adapter.layers[first:last]:
            hidden_BTD = hidden_output(layer(hidden_BTD, *call.args, **call.kwargs))
        return hidden_BTD

    def fill(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        call: _Call = step.context
        slots = self._cache.slots[index]
        self._cache.stand(step.offset, call.rows)
        slots.only_stores = True
        try:
            self.adapter.layers[index](hidden_ND.view_as(step.hidden), *call.args, **call.kwargs)
            raise RuntimeError("the layer did not reach its cache")
        except _Stored:
            pass
        finally:
            slots.only_stores = False

    def norm(self, hidden: Tensor) -> Tensor:
        return self.adapter.final_norm(hidden)

    def head(self, normed: Tensor) -> Tensor:
        return self.adapter.head(normed)

    def keep(self, counts: Sequence[int]) -> None:
        ends = [self._cache.settled + count for count in counts]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._align(ends)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self._cache.choose(torch.tensor(rows, device=self.adapter.model.device))
        self._align([self._cache.settled] * len(rows))

    def _align(self, ends: list[int]) -> None:
        """Move each row so that it ends, instead of in slot `ends[row]`, with the longest row."""
        width = max(self.lengths)
        for row, end in enumerate(ends):
            if end != width:
                self._cache.shift(row, width - end, max(width, end))
        self._cache.settle(width)

    def release(self) -> None:
        self._cache, self.lengths, self.prompt = _Slots([], 0), [], []


class _AtTheDoor(Exception):
    """What the first layer was called with."""


class _Stored(Exception):
    """A layer has handed over its keys and values, and nothing else is wanted of it."""


class _Slots(Cache):
    """All layers' slots; tokens that are not settled yet may be written again."""

    def __init__(self, layers: Sequence[nn.Module], capacity: int) -> None:
        self.slots = [_LayerSlots(capacity) for _ in layers]
        super().__init__(layers=list(self.slots))
        self.settled = 0

    def stand(self, offset: int, rows: Tensor | None = None) -> None:
        """The next tokens, of some rows or all, go behind the settled ones and `offset` more."""
        for layer in self.slots:
            layer.length, layer.rows = self.settled + offset, rows

    def settle(self, length: int) -> None:
        self.settled = length
        self.stand(0)

    def shift(self, row: int, places: int, width: int) -> None:
        """Move the first `width` slots of a row to the right, those at the end to the front."""
        for layer in self.slots:
            for slots_BHCK in layer.both():
                moved = slots_BHCK[row, :, :width]
                moved.copy_(moved.roll(places, dims=1))

    def choose(self, rows: Tensor) -> None:
        for layer in self.slots:
            layer.all_keys, layer.all_values = (each.index_select(0, rows) for each in layer.both())


class _LayerSlots(DynamicLayer):
    """Keys and values of a layer, `[B, H, C, K]` from the first token on."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.all_keys = self.all_values = torch.empty(0)
        self.rows: Tensor | None = None
        self.only_stores = False

    def both(self) -> tuple[Tensor, Tensor]:
        return self.all_keys, self.all_values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.all_keys, self.all_values = (
                each.new_zeros((*each.shape[:2], self.capacity, each.shape[3]))
                for each in (key_states, value_states)
            )
        end = self.length + key_states.shape[2]
        rows = slice(None) if self.rows is None else self.rows
        self.all_keys[rows, :, self.length : end] = key_states
        self.all_values[rows, :, self.length : end] = value_states
        if self.only_stores:
            raise _Stored
        self.length = end
        return self.all_keys[rows, :, :end], self.all_values[rows, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        return self.length
