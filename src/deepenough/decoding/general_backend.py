"""The general backend: the model's own layers, or the model itself, as transformers runs it.

`GeneralEngine` calls the layers one by one, over a cache allocated once. What they are called with
(masks, rotary cos/sin, the cache) the model makes itself: its trunk is entered and stopped at its
first layer, whose arguments then serve all layers (`deepenough.hf.intercept`). So this works for
every architecture whose layers are all called alike. Sequences are aligned on the right, as
transformers pads prompts: where some keep fewer tokens than others, they are moved.

`WholeModelEngine` calls the model itself, with the inputs and the cache that `generate` makes for
it. So this works for every model that generates text, but there are no states to be had between
its layers.

Shapes: B sequences, T tokens, D width, H heads, C capacity, K head width, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation.utils import ALL_CACHE_NAMES

from deepenough.decoding.engine import Engine, Pace, Step, row_lengths
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.hf.generation import inputs_of_generate
from deepenough.hf.intercept import StopForward, first_call, run_until_stopped


def make(adapter: Adapter) -> GeneralEngine:
    """Return a general engine, which takes every model that the adapter does."""
    return GeneralEngine(adapter)


class GeneralEngine(Engine):
    """Decodes any causal Hugging Face model through its own layers.

    The context of a step is what all layers are called with, and the rows of the cache or None.
    """

    backend = "general"
    takes_groups = False

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        parameters = inspect.signature(adapter.trunk.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._last_position = None if self.max_length is None else self.max_length - 1
        self._cache = _RewritableCache(0, 0)
        self._tokens = torch.empty(0)

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch from its prompts; see `Engine.prefill`."""
        lengths = row_lengths(ids_BT, mask_BT)
        width = max(lengths)
        if mask_BT is not None:
            order = mask_BT.bool().int().argsort(dim=1, stable=True)  # padding to the left
            ids_BT = ids_BT.gather(1, order)[:, -width:]
        self.capacity = max(capacity, width)
        self._cache = _RewritableCache(self.num_layers, self.capacity)
        self.lengths = lengths
        step = self._step(ids_BT, self._mask(), [length - width for length in lengths])
        hidden_BTD = self.run_through(step, step.hidden)
        self._cache.commit(width)
        self.prompt, self.prompt_inputs = (
            [row[-length:] for row, length in zip(states, lengths, strict=True)]
            for states in (hidden_BTD, self.layer_inputs)
        )
        return self.norm(hidden_BTD[:, -1])

    def _mask(self, more: int = 0) -> Tensor | None:
        """Return which cache entries each sequence has filled, `more` new tokens included.

        None if all sequences have filled all of them.
        """
        width = max(self.lengths)
        if min(self.lengths) == width:
            return None
        device = self.adapter.model.device
        starts = width - torch.tensor(self.lengths, device=device)
        return (torch.arange(width + more, device=device) >= starts[:, None]).long()

    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Embed the next tokens of every sequence; see `Engine.start_step`."""
        starts = [length + offset for length in self.lengths]
        self._tokens = tokens_BT
        return self._step(tokens_BT, self._mask(offset + tokens_BT.shape[1]), starts, offset)

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Make a step of the latest tokens of some sequences; see `Engine.resume`."""
        index = torch.tensor(rows, device=hidden_BTD.device)
        mask_BC = self._mask(1)
        mask_BC = None if mask_BC is None else mask_BC[index]
        call, _ = self._step(self._tokens[index], mask_BC, list(starts)).context
        return Step(hidden_BTD, 0, (call, index))

    def _step(
        self, tokens_BT: Tensor, mask_BC: Tensor | None, starts: list[int], offset: int = 0
    ) -> Step:
        """Return what the trunk would give to its first layer."""
        self._cache.stand(offset)
        given: dict[str, Any] = {"attention_mask": mask_BC}
        if self._takes_positions:
            steps = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            positions = steps + torch.tensor(starts, device=tokens_BT.device)[:, None]
            # Padding has no position, and drafts may reach beyond the last; nobody reads either.
            given["position_ids"] = positions.clamp(0, self._last_position)
        given |= {"past_key_values": self._cache, "use_cache": True}
        call = first_call(
            self.adapter.layers[0], lambda: self.adapter.trunk(input_ids=tokens_BT, **given)
        )
        return Step(call.hidden, offset, (call, None))

    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Return `h_last` from `h_first`; see `Engine.run_layers`."""
        call, rows = step.context
        self._cache.stand(step.offset, rows)
        for layer in self.adapter.layers[first:last]:
            hidden_BTD = call.run(layer, hidden_BTD)
        return hidden_BTD

    def write_kv(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Stop a layer when it hands its keys and values to the cache; see `Engine.write_kv`."""
        call, rows = step.context
        self._cache.stand(step.offset, rows)
        self._cache.stops_after_write = True
        try:
            hidden_BTD = hidden_ND.view_as(step.hidden)
            run_until_stopped(lambda: call.run(self.adapter.layers[index], hidden_BTD))
        finally:
            self._cache.stops_after_write = False

    def keep(self, counts: Sequence[int]) -> None:
        """Commit the first tokens of each sequence; see `Engine.keep`."""
        super().keep(counts)
        self._align([self._cache.committed + count for count in counts])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        self.lengths = [self.lengths[row] for row in rows]
        self._cache.choose(torch.tensor(rows, device=self.adapter.model.device))
        self._align([self._cache.committed] * len(rows))

    def _align(self, ends: list[int]) -> None:
        """Move each sequence so that it ends with the longest instead of at `ends[row]`."""
        width = max(self.lengths)
        for row, end in enumerate(ends):
            if end != width:
                self._cache.shift(row, width - end, max(width, end))
        self._cache.commit(width)

    def keep_prefix(self, count: int, capacity: int) -> bool:
        """Go on from the first tokens of what is cached; see `Engine.keep_prefix`."""
        self._cache.grow(capacity)
        self._cache.commit(count)
        self.capacity, self.lengths = self._cache.capacity, [count]
        return True

    def release(self) -> None:
        """Free the memory of the cache."""
        self._cache, self.lengths = _RewritableCache(0, 0), []
        self.prompt, self.prompt_inputs = [], []


class _RewritableCache(Cache):
    """A transformers cache whose tokens may be written again until they are committed."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity, self.committed = capacity, 0
        self.stand(0)
        self.stops_after_write = False
        self.entries = [_RewritableLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.entries))

    def stand(self, offset: int, rows: Tensor | None = None) -> None:
        """Put the next tokens, of some rows or all, `offset` behind the committed ones."""
        self.start, self.rows = self.committed + offset, slice(None) if rows is None else rows

    def commit(self, length: int) -> None:
        self.committed = length
        self.stand(0)

    def shift(self, row: int, places: int, width: int) -> None:
        """Move the first `width` entries of a row to the right, those at the end to the front."""
        for layer in self.entries:
            for cached_BHCK in (layer.all_keys, layer.all_values):
                moved = cached_BHCK[row, :, :width]
                moved.copy_(moved.roll(places, dims=1))

    def grow(self, capacity: int) -> None:
        more = max(0, capacity - self.capacity)
        self.capacity += more
        for layer in self.entries:
            layer.all_keys = F.pad(layer.all_keys, (0, 0, 0, more))
            layer.all_values = F.pad(layer.all_values, (0, 0, 0, more))

    def choose(self, rows: Tensor) -> None:
        for layer in self.entries:
            layer.all_keys = layer.all_keys.index_select(0, rows)
            layer.all_values = layer.all_values.index_select(0, rows)


class _RewritableLayer(DynamicLayer):
    """Keys and values of a layer, `[B, H, C, K]`, allocated with the first token."""

    def __init__(self, cache: _RewritableCache) -> None:
        super().__init__()
        self.cache = cache
        self.all_keys = self.all_values = torch.empty(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, rows = self.cache.start, self.cache.rows
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.all_keys, self.all_values = (
                each.new_zeros((*each.shape[:2], self.cache.capacity, each.shape[3]))
                for each in (key_states, value_states)
            )
        end = start + key_states.shape[2]
        self.all_keys[rows, :, start:end] = key_states
        self.all_values[rows, :, start:end] = value_states
        if self.cache.stops_after_write:
            raise StopForward
        return self.all_keys[rows, :, :end], self.all_values[rows, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        return self.cache.start


# -- the model as a whole --------------------------------------------------------------------------

#: Tokens that a pass takes at most where some of them have been through the model before.
_MOST_AGAIN = 8
#: What a pass over several tokens may find in a cache; layers of other kinds take single tokens.
_KNOWN_LAYERS = (
    *(DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer),
    *(LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
)


class WholeModelEngine(Engine):
    """Decodes any model of transformers by calling it as `generate` does, several tokens at a time.

    The states it hands out are logits. Tokens that are not kept are taken back by the cache's own
    means where it has them. Where it has none (recurrent layers), the cache is put back as it was
    before the pass, and the tokens that are kept go through the model again with the next ones.

    Several sequences go on together, token by token: the same calls as in `generate`, so padding is
    treated as there.
    """

    backend = "general"
    takes_groups = False
    layered = False
    tokens_at_once = 256  # of all of them logits are made
    pace = Pace()

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch from its prompts; see `Engine.prefill`."""
        model: Any = self.adapter.model
        if mask_BT is not None and not bool(mask_BT[:, -1].all()):
            raise UserError(
                f"{type(model).__name__} is run as a whole and takes prompts padded on the left: "
                'set tokenizer.padding_side = "left".'
            )
        self.lengths, self.capacity, self.prompt = row_lengths(ids_BT, mask_BT), capacity, []
        mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
        inputs = self.inputs or inputs_of_generate(model, inputs=ids_BT, attention_mask=mask_BT)[1]
        tensors = {name: each for name, each in inputs.items() if isinstance(each, Tensor)}
        moved = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        self._inputs = {**inputs, **moved, "use_cache": True}
        self._ids_BT, self._again_BT = ids_BT, ids_BT[:, :0]
        made = model.prepare_inputs_for_generation(ids_BT, is_first_iteration=True, **self._inputs)
        self._output = model(**made, return_dict=True)
        self._cache_name = next((name for name in ALL_CACHE_NAMES if name in self._output), "")
        cache = self._cache
        self._crops = isinstance(cache, Cache) and cache.is_croppable
        if self._crops:
            cache.activate_past_recording()
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
        is_known = layers and all(type(layer) in _KNOWN_LAYERS for layer in layers)
        self._takes_several = is_known or self._cache_name == "state"  # that of RWKV
        logits_BV: Tensor = self._output.logits[:, -1]
        return logits_BV

    @property
    def _cache(self) -> Any:
        return getattr(self._output, self._cache_name, None)

    def _inputs_with(self, tokens: int) -> dict[str, Any]:
        """Return the arguments of the model for this many tokens more than are in the cache."""
        model: Any = self.adapter.model
        found: dict[str, Any] = model._update_model_kwargs_for_generation(
            self._output, dict(self._inputs), model.config.is_encoder_decoder, tokens
        )
        return found

    def pass_limit(self) -> int | None:
        """Return how many tokens the next pass may take; see `Engine.pass_limit`."""
        if len(self.lengths) > 1 or not self._takes_several:
            return 1
        length = self.lengths[0]
        ends = (self.capacity, self.max_length)
        limits = [self.pace.limit(length), *(end - length for end in ends if end is not None)]
        limits.append(None if self._crops else _MOST_AGAIN - self._again_BT.shape[1])
        return max(1, min(limit for limit in limits if limit is not None))

    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Take the next tokens of every sequence; see `Engine.start_step`."""
        return Step(tokens_BT, offset)

    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Run the model over the tokens of a step, and return their logits `[B, T, V]`."""
        model: Any = self.adapter.model
        new = step.hidden.shape[1]
        self._entered_BT = torch.cat([self._again_BT, step.hidden], 1)
        self._before = None if self._crops or new == 1 else _copied(self._cache)
        tokens = self._entered_BT.shape[1]
        made = model.prepare_inputs_for_generation(
            torch.cat([self._ids_BT, self._entered_BT], 1),
            next_sequence_length=tokens,
            **self._inputs_with(tokens),
        )
        if "logits_to_keep" in made:
            made["logits_to_keep"] = new
        self._output = model(**made, return_dict=True)
        logits_BTV: Tensor = self._output.logits[:, -new:]
        return logits_BTV

    def keep(self, counts: Sequence[int]) -> None:
        """Commit the first tokens of each sequence; see `Engine.keep`."""
        super().keep(counts)
        kept, entered = self._again_BT.shape[1] + counts[0], self._entered_BT.shape[1]
        if self._crops:
            self._cache.crop(kept - entered)
        elif kept < entered:
            setattr(self._output, self._cache_name, self._before)
            self._again_BT = self._entered_BT[:, :kept]
            return
        self._inputs = self._inputs_with(kept)
        self._ids_BT = torch.cat([self._ids_BT, self._entered_BT[:, :kept]], 1)
        self._again_BT = self._entered_BT[:, :0]

    def keep_prefix(self, count: int, capacity: int) -> bool:
        """Go on from the first tokens of what is cached; see `Engine.keep_prefix`.

        Not where a pass takes few tokens, would need what a full window has dropped, or padding is
        or was before the text, which may count for something.
        """
        model, extra = self.adapter.model, self.lengths[0] - count
        can_read_on = self._crops and self._takes_several and self.pace.limit(count) is None
        mask_BT = self.inputs.get("attention_mask")
        has_padding = mask_BT is not None and not bool(mask_BT.all())
        has_padding = has_padding or self._ids_BT.shape[1] > self.lengths[0]
        if model.config.is_encoder_decoder or has_padding or not can_read_on:
            return False
        windows = [layer for layer in self._cache.layers if getattr(layer, "is_sliding", False)]
        if extra and any(each.get_seq_length() >= each.sliding_window for each in windows):
            return False
        ids_BT = self._ids_BT[:, :count]
        mask_BT = torch.ones_like(ids_BT)
        inputs = inputs_of_generate(model, inputs=ids_BT, attention_mask=mask_BT)[1]
        if inputs.keys() != self.inputs.keys():  # something else is given with this prompt
            return False
        self._cache.crop(-extra)
        self.lengths, self.capacity = [count], capacity
        self._ids_BT, self._inputs = ids_BT, {**inputs, "use_cache": True}
        return True

    def norm(self, hidden: Tensor) -> Tensor:
        """Return logits as they are."""
        return hidden

    def head(self, normed: Tensor) -> Tensor:
        """Return logits as they are."""
        return normed

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Raise: there are no states to go on from."""
        raise NotImplementedError

    def write_kv(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Raise: there is no layer to write to."""
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        """Raise: sequences go on together until all are done."""
        raise NotImplementedError

    def release(self) -> None:
        """Free the memory of the cache."""
        self.lengths, self.inputs, self._inputs, self._output, self._before = [], {}, {}, {}, None
        self.prompt = []


def _copied(cache: Any) -> Any:
    """Return a copy of a cache that a pass leaves alone.

    Keys and values that a layer replaces by longer ones, and never writes to, are shared.
    """
    growing = [layer for layer in getattr(cache, "layers", []) if isinstance(layer, DynamicLayer)]
    shared = [tensor for layer in growing for tensor in (layer.keys, layer.values)]
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in shared})
