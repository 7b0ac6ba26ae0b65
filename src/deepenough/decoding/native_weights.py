"""Weights as compiled code reads them: as they are stored, packed once, and checked.

fp32, bf16 or fp16, whichever holds them exactly, or the quantised blocks of the GGUF file that they
come from. The code is `native/`, compiled when the package is installed where there is a C++
compiler. After packing, weights are compared with those of the model.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, is_deferred
from deepenough.hf.deferred import StoredTensor, gguf_tensors, stored_parameters
from deepenough.hf.loading import stored_gguf
from deepenough.shortcut.pruned_model import LinearPart

log = logging.getLogger("deepenough")
LIBRARY = Path(os.environ.get("DEEPENOUGH_NATIVE") or Path(__file__).with_name("_native.so"))
#: Number of the calls that the library offers, as native/api.cpp has it.
INTERFACE = 3
FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Rows that are compared at once after packing.
CHECKED = 64
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
#: Places, among a layer's matrices and vectors, of a map that stands for a part of it, or for all
#: of it, and of the map's bias.
MAPS = {"self_attn": (3, 4), "mlp": (6, 8), "": (3, 4)}
VECTORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"self_attn.{name}_proj.bias" for name in "qkv"),
)


class NativeConfig(ctypes.Structure):
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
    if not hasattr(library, "de_interface") or library.de_interface() != INTERFACE:
        log.warning("%s is of another version and not used: compile it anew", LIBRARY)
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


def replaced_parts(layer: nn.Module) -> set[str]:
    """Return which keys of `MAPS` are parts of a layer that pruning has replaced or removed."""
    parts = {name: getattr(layer, name, None) if name else layer for name in MAPS}
    return {name for name, part in parts.items() if isinstance(part, LinearPart)}


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
        config = model.config.get_text_config()
        self.adapter, self.heads = adapter, (config.num_attention_heads, config.num_key_value_heads)
        self.width, self.vocab = config.hidden_size, config.vocab_size
        self.head_width = first.self_attn.head_dim
        rotary = 2 * self.rotary(1)[0].shape[1]
        sizes = [len(shape.layers), self.width, *self.heads]
        sizes += [self.head_width, config.intermediate_size, self.vocab, rotary]
        scale, sizes_8 = first.self_attn.scaling, (ctypes.c_int * 8)(*sizes)
        self.config = own = NativeConfig(sizes_8, config.rms_norm_eps, scale, exact, False)
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
            maps = {MAPS[name][1]: f"{name}.bias".strip(".") for name in replaced_parts(module)}
            for which, name in (*enumerate(VECTORS), *maps.items()):
                if name in parameters:
                    own_vector = parameters[name]
                    self.set_vector(index, which, on_disk.get(own_vector, own_vector))
        norm = shape.trunk.norm.weight
        self.set_vector(-1, 0, on_disk.get(norm, norm))

    def _matrices(self, adapter: Adapter) -> Iterator[tuple[int, int, nn.Parameter, str]]:
        """Yield layer, place, weights and GGUF name of every matrix; those of the model are -1."""
        model: Any = adapter.model
        embedding, head = adapter.trunk.embed_tokens.weight, model.get_output_embeddings().weight
        yield -1, 0, embedding, "token_embd.weight"
        if head is not embedding:
            yield -1, 1, head, "output.weight"
        # A pruned model's layers have other numbers in the file of the model that it was made from.
        numbers = getattr(model.config, "kept", range(len(adapter.layers)))
        for index, (layer, number) in enumerate(zip(adapter.layers, numbers, strict=True)):
            weights = dict(layer.named_parameters())
            for which, (module, name) in enumerate(MATRICES.items()):
                if (weight := weights.get(f"{module}.weight")) is not None:
                    yield index, which, weight, f"blk.{number}.{name}.weight"
            for part in replaced_parts(layer):
                if (weight := weights.get(f"{part}.weight".strip("."))) is not None:
                    yield index, MAPS[part][0], weight, ""

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


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's numbers."""
    return ctypes.c_void_p(tensor.data_ptr())
