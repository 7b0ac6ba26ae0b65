"""The native backend: a whole pass of a Llama-like decoder in one call of compiled code, on a CPU.

It reads the weights as they are stored: fp32, bf16 or fp16, whichever holds them exactly, or the
quantised blocks of the GGUF file that they come from. Products with quantised weights are `exact`
(integer sums without rounding) or `fp32`; `native/kernels.h` says how. The code is `native/`,
compiled when the package is installed where there is a C++ compiler.

Shapes: B sequences, T tokens, D width, V vocabulary, N rows.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from deepenough.decoding.engine import Engine, ModelState, Step, is_untouched, row_lengths
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, is_deferred
from deepenough.hf.deferred import StoredTensor, gguf_tensors, stored_parameters
from deepenough.hf.loading import stored_gguf

LIBRARY = Path(os.environ.get("DEEPENOUGH_NATIVE") or Path(__file__).with_name("_native.so"))
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
#: Rotary encodings that are a function of the position alone, and so can be tabled.
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Rows that are compared at once after packing.
CHECKED = 64
#: Tokens of prompts that go through the layers at once.
PASS = 256
#: Up to so many tokens, the call that runs the last layers makes the logits, too.
FUSED = 8
#: Matrices and vectors of a layer: the module, and the tensor's name in a GGUF file.
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VECTORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
)


class _Config(ctypes.Structure):
    """`Config` of native/model.h."""

    _fields_ = (
        ("sizes", ctypes.c_int * 8),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("exact", ctypes.c_bool),
        ("paired", ctypes.c_bool),
    )


@lru_cache(maxsize=1)
def load_library() -> Any:
    """Return the compiled library, or None where there is none that this machine can load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    for name in ("de_model_new", "de_head_new", "de_cache_new"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("de_error", "de_kernels"):
        getattr(library, name).restype = ctypes.c_char_p
    library.de_model_bytes.restype = ctypes.c_int64
    library.de_read_rate.restype = ctypes.c_double
    return library


def kernel_names() -> list[str]:
    """Return the kernels that this CPU can run, the fastest first."""
    library, names = load_library(), ("avx512vnni", "avx512", "avx2", "portable")
    return [name for name in names if library and library.de_kernels(name.encode())]


def make(adapter: Adapter) -> NativeEngine | None:
    """Return a native engine for a model, or None if it does not fit."""
    return NativeEngine(adapter) if fits(adapter) else None


def fits(adapter: Adapter) -> bool:
    """Return whether a model is of this layout, on a CPU, with nothing added to its blocks."""
    model: Any = adapter.model
    config, shape = model.config, adapter.skeleton
    if load_library() is None or config.model_type not in MODEL_TYPES:
        return False
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    if shape.trunk.rotary_emb.rope_type not in FIXED_ROPES or config.hidden_act != "silu":
        return False
    if getattr(config, "sliding_window", None):
        return False
    if not all(map(is_untouched, shape.trunk.modules())):
        return False
    known = {f"{name}.weight" for name in MATRICES} | set(VECTORS)
    for layer in shape.layers:
        linears = [layer.get_submodule(name) for name in MATRICES]
        if any(type(module) is not nn.Linear for module in linears):
            return False
        if not {name for name, _ in layer.named_parameters()} <= known:
            return False
    head: Any = shape.model.get_output_embeddings()
    return type(head) is nn.Linear and head.bias is None


class Packable(NamedTuple):
    """A matrix as it is stored: bytes, format, and the order of its rows."""

    data: np.ndarray
    format: str
    order: np.ndarray | None = None


def as_stored(weight: Tensor) -> Packable:
    """Return weights as they are or, of fp32, in the smallest of three that holds them exactly."""
    if weight.dtype is not torch.float32:
        name = "BF16" if weight.dtype is torch.bfloat16 else "F16"
        return Packable(weight.view(torch.int16).numpy(), name)
    bits = weight.detach().contiguous().view(torch.int32).numpy()
    if not (bits & 0xFFFF).any():
        return Packable((bits >> 16).astype(np.int16), "BF16")
    half = weight.detach().half()
    if torch.equal(half.float(), weight.detach()):
        return Packable(half.contiguous().view(torch.int16).numpy(), "F16")
    return Packable(bits, "F32")


def gguf_matrix(stored: StoredTensor, name: str, heads: int, kv_heads: int) -> Packable:
    """Return a matrix of a GGUF file, rows of queries and keys in the order of transformers."""
    order = None
    for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
        if f".{part}." in name:  # pairs of channels that rotate together are neighbours
            pairs = np.arange(stored.shape[0], dtype=np.int32).reshape(count, -1, 2)
            order = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
    return Packable(stored.read(), stored.format, order)


def rows_of(weight: Tensor | StoredTensor, first: int = 0, count: int | None = None) -> Tensor:
    """Return some rows of a parameter, or all; one of a deferred model stands on disk."""
    if isinstance(weight, Tensor):
        return weight.detach()[first : None if count is None else first + count]
    found = torch.from_numpy(weight.read(first, count)).view(DTYPES[weight.format])
    return found.view(-1, *weight.shape[1:])


class NativeWeights:
    """Weights, packed for the kernels."""

    def __init__(self, made: int | None) -> None:
        self.library, self.handle = load_library(), ctypes.c_void_p(made)
        self._check(made)
        weakref.finalize(self, self.library.de_model_free, self.handle)
        self.positions = 0
        self.formats: set[str] = set()

    def set_matrix(self, layer: int, which: int, weight: Tensor | StoredTensor) -> None:
        """Pack a matrix of a layer, or of the whole model (-1)."""
        if not self.packed(layer, which, weight, as_stored(rows_of(weight))):
            raise RuntimeError("packed weights differ from those of the model")

    def packed(
        self, layer: int, which: int, weight: Tensor | StoredTensor, stored: Packable
    ) -> bool:
        """Pack a matrix, and return whether it stands for the weights: on disk, for some rows."""
        order = None if stored.order is None else stored.order.ctypes.data
        data, (rows, cols) = np.ascontiguousarray(stored.data), weight.shape
        kind = FORMATS[stored.format]
        self.call("de_model_matrix", layer, which, kind, data.ctypes.data, rows, cols, order)
        last = max(0, rows - CHECKED)
        found = torch.empty(min(rows, CHECKED), cols)
        for first in (
            range(0, rows, CHECKED) if isinstance(weight, Tensor) else (0, last // 2, last)
        ):
            own = rows_of(weight, first, CHECKED).float().contiguous()
            self.call("de_model_rows", layer, which, first, len(own), pointer(found))
            if not torch.equal(found[: len(own)].view(torch.int32), own.view(torch.int32)):
                return False
        self.formats.add(stored.format)
        return True

    def set_vector(self, layer: int, which: int, values: Tensor | StoredTensor) -> None:
        """Keep the weights of a norm, or biases."""
        own = rows_of(values).float().contiguous()
        self.call("de_model_vector", layer, which, pointer(own), own.numel())

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[positions, rotated channels / 2]`."""
        raise NotImplementedError

    def see_positions(self, positions: int) -> None:
        """Make rotary tables for so many positions, if there are none yet."""
        if positions > self.positions:
            cosines, sines = (each.contiguous() for each in self.rotary(positions))
            self.call("de_model_rotary", pointer(cosines), pointer(sines), cosines.numel())
            self.positions = positions

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library with this model."""
        given = [
            ctypes.c_void_p(each) if isinstance(each, int) and each > 2**31 else each
            for each in arguments
        ]
        self._check(getattr(self.library, name)(self.handle, *given) == 0)

    def _check(self, is_done: Any) -> None:
        if not is_done:
            raise UserError(f"The native backend failed: {self.library.de_error().decode()}.")


class NativeModel(NativeWeights):
    """A model's weights, and the threads that multiply with them."""

    def __init__(
        self, adapter: Adapter, exact: bool = True, kernels: str | None = None, threads: int = 0
    ) -> None:
        shape = adapter.skeleton
        model: Any = shape.model
        first: Any = shape.layers[0]
        config = model.config
        self.adapter, self.heads = adapter, (config.num_attention_heads, config.num_key_value_heads)
        self.width, self.vocab = config.hidden_size, config.vocab_size
        self.head_width = first.self_attn.head_dim
        rotary = 2 * self.rotary(1)[0].shape[1]
        sizes = [len(shape.layers), self.width, *self.heads]
        sizes += [self.head_width, config.intermediate_size, self.vocab, rotary]
        scale, sizes_8 = first.self_attn.scaling, (ctypes.c_int * 8)(*sizes)
        self.config = own = _Config(sizes_8, config.rms_norm_eps, scale, exact, False)
        chosen = None if kernels is None else kernels.encode()
        threads = threads or torch.get_num_threads()
        super().__init__(load_library().de_model_new(ctypes.byref(own), chosen, threads))
        gguf = stored_gguf(adapter.model)
        in_gguf = gguf_tensors(gguf) if gguf else {}
        on_disk = stored_parameters(adapter.model) if is_deferred(adapter.model) else {}
        for layer, which, weight, name in self._matrices(shape):
            found, in_file = on_disk.get(weight, weight), in_gguf.get(name)
            is_like = in_file is not None and in_file.shape == tuple(weight.shape)
            stored = gguf_matrix(in_file, name, *self.heads) if in_file and is_like else None
            # From the GGUF file if that still stands for the same numbers.
            if stored is None or not self.packed(layer, which, found, stored):
                self.set_matrix(layer, which, found)
        for index, module in enumerate(shape.layers):
            parameters = dict(module.named_parameters())
            for which, name in enumerate(VECTORS):
                if name in parameters:
                    own_vector = parameters[name]
                    self.set_vector(index, which, on_disk.get(own_vector, own_vector))
        norm = shape.trunk.norm.weight
        self.set_vector(-1, 0, on_disk.get(norm, norm))

    def _matrices(self, adapter: Adapter) -> Iterator[tuple[int, int, nn.Parameter, str]]:
        """Yield layer, place, weights and GGUF name of every matrix; those of the model are -1."""
        model: Any = adapter.model
        embedding, head = adapter.trunk.embed_tokens.weight, model.lm_head.weight
        yield -1, 0, embedding, "token_embd.weight"
        if head is not embedding:
            yield -1, 1, head, "output.weight"
        for index, layer in enumerate(adapter.layers):
            for which, (module, name) in enumerate(MATRICES.items()):
                weight: Any = layer.get_submodule(module).weight
                yield index, which, weight, f"blk.{index}.{name}.weight"

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines; see `NativeWeights.rotary`."""
        rotary = self.adapter.skeleton.trunk.rotary_emb
        if rotary.inv_freq.is_meta:
            rotary = type(rotary)(rotary.config)
        cosines, sines = rotary(torch.empty(0), torch.arange(positions)[None])
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half], sines[0, :, :half]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[..., D]`."""
        tokens = tokens.contiguous()
        hidden = torch.empty(*tokens.shape, self.width)
        self.call("de_embed", pointer(tokens), tokens.numel(), pointer(hidden))
        return hidden


class NativeHead(NativeWeights):
    """An EAGLE-3 head, run with the threads of its model; see `eagle3.TorchHead`."""

    def __init__(self, head: Any, model: NativeModel) -> None:
        config, layer = head.config, head.midlayer
        self.config, self.model = config, model
        sizes = [1, config.hidden_size, config.num_attention_heads, config.num_key_value_heads]
        sizes += [config.head_dim, config.intermediate_size, config.draft_vocab_size]
        scale, sizes_8 = config.head_dim**-0.5, (ctypes.c_int * 8)(*sizes, config.head_dim)
        own = _Config(sizes_8, config.rms_norm_eps, scale, False, True)
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
            where = places.rows, places.starts, len(rows), count
            self.call(
                "de_head_layer", self._cache.handle, *where, pointer(embeddings), pointer(hidden)
            )
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


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's numbers."""
    return ctypes.c_void_p(tensor.data_ptr())


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
        self.call_step("de_layers", step, first, last, pointer(hidden), None, None, None)
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
        self.call_step("de_layers", step, first, self.num_layers, *map(pointer, made))
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


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class NativeMaps(NativeWeights):
    """Maps between the layers of a model, packed when they are first used, and a small head."""

    def __init__(self, engine: NativeEngine, shortcuts: Any, vocab: Tensor | None) -> None:
        self.engine, self.shortcuts, self.vocab = engine, shortcuts, vocab
        self._known: dict[tuple[int, int, str | None], tuple[int, Tensor, Tensor | None, int]] = {}
        model, layers = engine.native, engine.num_layers
        own = _Config.from_buffer_copy(model.config)
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
