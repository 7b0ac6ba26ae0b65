"""The native backend: a whole pass of a Llama-like decoder in one call of compiled code, on a CPU.

Products with quantised weights are `exact` (integer sums without rounding) or `fp32`;
`native/kernels.h` says how.

Shapes: B sequences, T tokens, D width, V vocabulary, N rows.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.decoding.engine import Engine, ModelState, Step, is_untouched, row_lengths
from deepenough.decoding.native_weights import (
    MATRICES,
    VECTORS,
    NativeConfig,
    NativeModel,
    NativeWeights,
    load_library,
    pointer,
    replaced_parts,
)
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
#: Rotary encodings that are a function of the position alone, and so can be tabled.
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
#: Tokens of prompts that go through the layers at once.
PASS = 256
#: Up to so many tokens, the call that runs the last layers makes the logits, too.
FUSED = 8


def make(adapter: Adapter) -> NativeEngine | None:
    """Return a native engine for a model, or None if it does not fit."""
    return NativeEngine(adapter) if fits(adapter) else None


def fits(adapter: Adapter) -> bool:
    """Return whether a model is of this layout, on a CPU, with nothing added to its blocks."""
    model: Any = adapter.model
    config, shape = model.config.get_text_config(), adapter.skeleton
    if load_library() is None or config.model_type not in MODEL_TYPES:
        return False
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    rotary = getattr(shape.trunk, "rotary_emb", None)  # not of a text model inside another one
    if rotary is None or rotary.rope_type not in FIXED_ROPES or config.hidden_act != "silu":
        return False
    if getattr(config, "sliding_window", None):
        return False
    if not all(map(is_untouched, shape.trunk.modules())):
        return False
    for layer in shape.layers:
        replaced = replaced_parts(layer)
        names = [name for name in MATRICES if not replaced & {"", name.partition(".")[0]}]
        if any(type(layer.get_submodule(name)) is not nn.Linear for name in names):
            return False
        known = {f"{name}.weight" for name in names} | set(VECTORS)
        known |= {f"{name}.{each}".strip(".") for name in replaced for each in ("weight", "bias")}
        if not {name for name, _ in layer.named_parameters()} <= known:
            return False
    head: Any = shape.model.get_output_embeddings()
    return type(head) is nn.Linear and head.bias is None


class NativeEngine(Engine):
    """Decodes Llama, Mistral, Qwen 2 and Qwen 3 through the compiled library."""

    backend = "native"

    def __init__(self, adapter: Adapter, cache_bf16: bool = False, **options: Any) -> None:
        super().__init__(adapter)
        self.native = NativeModel(adapter, **options)
        self.cache_bf16 = cache_bf16
        """Whether keys and values are rounded to bf16, which halves what a long context costs."""
        self._cache: _Cache | None = None
        self._head: tuple[ModelState, NativeHead] | None = None
        self._maps: NativeMaps | None = None
        self._latest: tuple[Tensor | None, ...] = (None,) * 4
        """States after the last layer, normed, logits and best tokens of the latest pass."""

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor | None, capacity: int) -> Tensor:
        """Start a batch from its prompts; see `Engine.prefill`."""
        lengths = row_lengths(ids_BT, mask_BT)
        batch, width = ids_BT.shape
        if mask_BT is not None:  # padding goes behind the prompts, where it is overwritten
            order = mask_BT.bool().int().argsort(dim=1, descending=True, stable=True)
            ids_BT = ids_BT.gather(1, order)
        self.capacity = max(capacity, width)
        self.native.see_positions(self.capacity + 16)
        self._cache = _Cache(self.native, batch, self.capacity, self.cache_bf16)
        self.lengths = [0] * batch
        most = max(1, PASS // batch)
        steps = [self.start_step(part, most * n) for n, part in enumerate(ids_BT.split(most, 1))]
        parts = [(self.run_through(step, step.hidden), self.layer_inputs) for step in steps]
        self.lengths = lengths
        self.prompt, self.prompt_inputs = (
            [row[:length] for row, length in zip(torch.cat(part, 1), lengths, strict=True)]
            for part in zip(*parts, strict=True)
        )
        return self.norm(torch.stack([row[-1] for row in self.prompt]))

    def start_step(self, tokens_BT: Tensor, offset: int = 0) -> Step:
        """Embed the next tokens of every sequence; see `Engine.start_step`."""
        hidden = self.native.embed(tokens_BT)
        return Step(hidden, offset, _Places(range(len(tokens_BT)), self.lengths, offset))

    def resume(self, hidden_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]) -> Step:
        """Make a step of states of some sequences; see `Engine.resume`."""
        return Step(hidden_BTD, 0, _Places(rows, starts))

    def run_layers(self, step: Step, hidden_BTD: Tensor, first: int, last: int) -> Tensor:
        """Return `h_last` from `h_first`; see `Engine.run_layers`."""
        hidden = hidden_BTD.clone(memory_format=torch.contiguous_format)
        self.call_step("de_layers", step, first, last, None, pointer(hidden), None, None, None)
        return hidden

    def run_to_end(self, step: Step, hidden_BTD: Tensor, first: int) -> Tensor:
        """Return `h_L` from `h_first`, and make the logits of few tokens by the same call."""
        if hidden_BTD.shape[0] * hidden_BTD.shape[1] > FUSED:
            return self.run_layers(step, hidden_BTD, first, self.num_layers)
        hidden = hidden_BTD.clone(memory_format=torch.contiguous_format)
        normed = torch.empty_like(hidden)
        logits = torch.empty(*hidden.shape[:-1], self.native.vocab)
        best = torch.empty(hidden.shape[:-1], dtype=torch.long)
        made = hidden, normed, logits, best
        self.call_step("de_layers", step, first, self.num_layers, None, *map(pointer, made))
        self._latest = made
        return hidden

    def write_kv(self, index: int, hidden_ND: Tensor, step: Step) -> None:
        """Write a layer's keys and values only; see `Engine.write_kv`."""
        hidden = pointer(hidden_ND.contiguous())
        self.call_step("de_write_kv", step, index, index + 1, None, None, hidden)

    def call_step(self, name: str, step: Step, *arguments: Any) -> None:
        """Call a function of the library for the tokens of a step."""
        places, tokens = step.context, step.hidden.shape[1]
        assert self._cache is not None
        self.native.call(
            name,
            self._cache.handle,
            places.rows,
            places.starts,
            len(places.rows),
            tokens,
            *arguments,
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm between the last layer and the head."""
        found = self._latest[1]
        if found is not None and hidden is self._latest[0]:
            return found
        own = hidden.contiguous()
        normed = torch.empty_like(own)
        count = own.numel() // self.native.width
        self.native.call("de_finish", pointer(own), count, 0, pointer(normed), None)
        return normed

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `[..., V]` of normed states."""
        found = self._latest[2]
        if found is not None and normed is self._latest[1]:
            return found
        own = normed.contiguous()
        logits = torch.empty(*own.shape[:-1], self.native.vocab)
        count = own.numel() // self.native.width
        self.native.call("de_finish", pointer(own), count, 1, None, pointer(logits))
        return logits

    def best(self, logits: Tensor) -> Tensor | None:
        """Return the tokens of the largest logits, which the latest pass has found."""
        return self._latest[3] if logits is self._latest[2] else None

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[..., D]`."""
        return self.native.embed(tokens)

    def draft_head(self, head: Any) -> NativeHead:
        """Return a draft head that this backend runs; see `Engine.draft_head`."""
        state = ModelState(head)
        if self._head is None or self._head[0] != state:
            self._head = state, NativeHead(head, self.native)
        return self._head[1]

    def exit_maps(self, shortcuts: Any, vocab: Tensor | None) -> NativeMaps:
        """Return maps that this backend applies; see `Engine.exit_maps`."""
        maps = self._maps
        if maps is None or not maps.is_of(shortcuts, vocab):
            maps = self._maps = NativeMaps(self, shortcuts, vocab)
        return maps

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        assert self._cache is not None
        self._cache.select(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def keep_prefix(self, count: int, capacity: int) -> bool:
        """Go on from the first tokens of what is cached; see `Engine.keep_prefix`."""
        if self._cache is None:
            return False
        if capacity > self.capacity:
            self.capacity = capacity
            self.native.see_positions(capacity + 16)
            self._cache.grow(capacity)
        self.lengths = [count]
        return True

    def release(self) -> None:
        """Free the memory of the cache."""
        self._cache, self.lengths, self.prompt, self.prompt_inputs = None, [], [], []
        self._latest = (None,) * 4


class NativeHead(NativeWeights):
    """An EAGLE-3 head, run with the threads of its model; see `eagle3.TorchHead`."""

    def __init__(self, head: Any, model: NativeModel) -> None:
        config, layer = head.config, head.midlayer
        self.config, self.model = config, model
        sizes = [1, config.hidden_size, config.num_attention_heads, config.num_key_value_heads]
        sizes += [config.head_dim, config.intermediate_size, config.draft_vocab_size]
        scale, sizes_8 = config.head_dim**-0.5, (ctypes.c_int * 8)(*sizes, config.head_dim)
        own = NativeConfig(sizes_8, config.rms_norm_eps, scale, False, True)
        super().__init__(load_library().de_head_new(ctypes.byref(own), model.handle))
        for which, name in enumerate(MATRICES):
            self.set_matrix(0, which, layer.get_submodule(name).weight)
        self.set_matrix(-1, 1, head.lm_head.weight)
        self.set_matrix(-1, 2, (head.fc.weight / head.input_scale).to(head.fc.weight.dtype))
        norms = {0: "input_layernorm", 1: "post_attention_layernorm", len(VECTORS): "hidden_norm"}
        for which, name in norms.items():
            self.set_vector(0, which, layer[name].weight)
        self.set_vector(-1, 0, head.norm.weight)

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines; see `NativeWeights.rotary`."""
        half = self.config.head_dim // 2
        angles = torch.arange(positions)[:, None] * self.config.rope_theta ** (
            -torch.arange(half) / half
        )
        return angles.cos(), angles.sin()

    def begin(self, sequences: int, capacity: int) -> None:
        """Start with an empty cache for so many sequences and tokens."""
        self.see_positions(capacity)
        self._cache = _Cache(self, sequences, capacity, False)

    def fuse(self, inputs: Tensor) -> Tensor:
        """Return `g` `[..., D]` of the inputs of three layers, `[..., 3 D]`."""
        own = inputs.contiguous()
        features = torch.empty(*own.shape[:-1], self.config.hidden_size)
        count = features.numel() // self.config.hidden_size
        self.call("de_multiply", -1, 2, pointer(own), count, pointer(features))
        return features

    def step(
        self, tokens_BT: Tensor, features_BTD: Tensor, starts: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Return `v` of some sequences, whose tokens begin behind `starts` cached ones."""
        found, done = [], 0
        for tokens, features in zip(
            *(each.split(max(1, PASS // len(rows)), 1) for each in (tokens_BT, features_BTD)),
            strict=True,
        ):
            places, count = _Places(rows, starts, done), tokens.shape[1]
            hidden = features.clone(memory_format=torch.contiguous_format)
            embeddings = self.model.embed(tokens)
            where = self._cache.handle, places.rows, places.starts, len(rows), count
            given = 0, 1, pointer(embeddings), pointer(hidden)
            self.call("de_layers", *where, *given, None, None, None)
            found.append(hidden)
            done += count
        return torch.cat(found, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., S]` of what `step` gave."""
        own = hidden.contiguous()
        logits = torch.empty(*own.shape[:-1], self.config.draft_vocab_size)
        count = own.numel() // self.config.hidden_size
        self.call("de_finish", pointer(own), count, 0, None, pointer(logits))
        return logits


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class NativeMaps(NativeWeights):
    """Maps between the layers of a model, packed when they are first used, and a small head."""

    def __init__(self, engine: NativeEngine, shortcuts: Any, vocab: Tensor | None) -> None:
        self.engine, self.shortcuts, self.vocab = engine, shortcuts, vocab
        self._known: dict[tuple[int, int, str | None], tuple[int, Tensor, Tensor | None, int]] = {}
        model, layers = engine.native, engine.num_layers
        own = NativeConfig.from_buffer_copy(model.config)
        own.sizes[0], own.sizes[6] = layers * (layers + 3) // 2, 1 if vocab is None else len(vocab)
        super().__init__(load_library().de_head_new(ctypes.byref(own), model.handle))
        if vocab is not None:
            ids = vocab.contiguous()
            self.call("de_take_rows", model.handle, pointer(ids), len(ids))

    def is_of(self, shortcuts: Any, vocab: Tensor | None) -> bool:
        """Return whether these are the maps, none changed since it was packed, and the tokens."""
        same = vocab is self.vocab or (
            vocab is not None and self.vocab is not None and torch.equal(vocab, self.vocab)
        )
        versions = (known[3] == _version(known[1]) for known in self._known.values())
        return same and shortcuts is self.shortcuts and all(versions)

    def _place(self, first: int, last: int, mode: str | None) -> tuple[int, Tensor | None]:
        """Return where the map between two layers is packed, and its bias."""
        key = first, last, mode
        if key not in self._known:
            matrix, bias = self.shortcuts.pair(first, last, mode)
            place = len(self._known)
            self.set_matrix(place, 0, matrix.float())
            if bias is not None:
                bias = bias.float()
                self.set_vector(place, VECTORS.index("self_attn.q_proj.bias"), bias)
            self._known[key] = place, matrix, bias, _version(matrix)
        return self._known[key][0], self._known[key][2]

    def apply(self, state_ND: Tensor, first: int, last: int, mode: str | None) -> Tensor:
        """Return states of layer `first` as the map takes them to layer `last`."""
        place, bias = self._place(first, last, mode)
        own = state_ND.contiguous()
        found = torch.empty_like(own)
        self.call("de_multiply", place, 0, pointer(own), len(own), pointer(found))
        return found if bias is None else found.add_(bias)

    def logits(self, normed_ND: Tensor) -> Tensor:
        """Return the logits of the small head."""
        own, vocab = normed_ND.contiguous(), self.vocab
        assert vocab is not None
        logits = torch.empty(len(own), len(vocab))
        self.call("de_finish", pointer(own), len(own), 1, None, pointer(logits))
        return logits

    def fill(self, step: Step, state_ND: Tensor, layer: int, copies: bool) -> None:
        """Write keys and values of all layers behind `layer`, of states there or of mapped ones."""
        last = self.engine.num_layers
        places = [
            -1 if copies or index == layer else self._place(layer, index, None)[0]
            for index in range(layer, last)
        ]
        which, own = (ctypes.c_int * len(places))(*places), state_ND.contiguous()
        self.engine.call_step("de_write_kv", step, layer, last, self.handle, which, pointer(own))


class _Places:
    """Where the tokens of a step stand: sequences of the cache, and positions in them."""

    def __init__(self, rows: Sequence[int], starts: Sequence[int], offset: int = 0) -> None:
        kind = ctypes.c_int * len(rows)
        self.rows, self.starts = kind(*rows), kind(*(start + offset for start in starts))


class _Cache:
    """Keys and values of some sequences."""

    def __init__(self, model: NativeWeights, sequences: int, capacity: int, is_bf16: bool) -> None:
        self.library = model.library
        made = self.library.de_cache_new(model.handle, sequences, capacity, int(is_bf16))
        if not made:
            raise UserError(
                f"There is no room for keys and values of {sequences} sequences of {capacity} "
                "tokens: give fewer, or shorter ones."
            )
        self.handle = ctypes.c_void_p(made)
        weakref.finalize(self, self.library.de_cache_free, self.handle)

    def grow(self, capacity: int) -> None:
        if self.library.de_cache_grow(self.handle, capacity):
            raise UserError(
                f"There is no room for keys and values of {capacity} tokens: give shorter texts."
            )

    def select(self, rows: Sequence[int]) -> None:
        self.library.de_cache_select(self.handle, (ctypes.c_int * len(rows))(*rows), len(rows))
