"""Models whose modules are made, and weights read, only when something asks for them.

`load_deferred` returns a model of the usual class, config and generation settings, but without its
modules. Whoever reads a module or parameter, in whatever way, first has the model loaded as usual,
so that nobody ever sees it empty. Until then a decoder can read the weights one by one as they are
stored, from safetensors or GGUF files, and keep them in a form of its own.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from deepenough.hf.adapter import is_deferred
from deepenough.hf.loading import PACKAGED, find_place, from_pretrained, load, own_class
from deepenough.training.logging import without_bars

#: Types of GGUF files that are read, by number, and the bytes of a block of so many weights.
GGUF_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
BLOCKS = {"F32": (4, 1), "F16": (2, 1), "BF16": (2, 1)} | {
    name: (size, 32) for name, size in _BLOCK_BYTES.items()
}
#: What the values of a GGUF file's metadata are, by number: their bytes.
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """Where a tensor stands in a file, and how."""

    path: Path
    offset: int
    format: str
    shape: tuple[int, ...]

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return the bytes of the tensor, or of some of its rows."""
        size, weights = BLOCKS[self.format]
        row = math.prod(self.shape[1:]) // weights * size
        left = self.shape[0] - first
        count = left if count is None else min(count, left)
        return np.fromfile(self.path, np.uint8, count * row, offset=self.offset + first * row)


def safetensors_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the safetensors files of a model; none if some cannot be read so."""
    found: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, each in header.items():
            if each["dtype"] not in BLOCKS or name in found:
                return {}
            offset = 8 + size + each["data_offsets"][0]
            found[name] = StoredTensor(path, offset, each["dtype"], tuple(each["shape"]))
    return found


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file whose types are known here."""
    place = 8  # behind magic and version
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:

        def read(kind: str) -> int:
            nonlocal place
            (value,) = struct.unpack_from(f"<{kind}", data, place)
            place += struct.calcsize(kind)
            return value

        def read_name() -> str:
            nonlocal place
            size = read("Q")
            place += size
            return data[place - size : place].decode()

        def skip(kind: int, count: int = 1) -> None:
            nonlocal place
            if kind in _GGUF_SIZES:
                place += count * _GGUF_SIZES[kind]
                return
            for _ in range(count):
                if kind == _GGUF_STRING:
                    size = read("Q")
                    place += size
                else:
                    skip(read("I"), read("Q"))

        num_tensors, num_values, alignment = read("Q"), read("Q"), 32
        for _ in range(num_values):
            name, kind = read_name(), read("I")
            if name == "general.alignment":
                alignment = read("I")
            else:
                skip(kind)
        listed = []
        for _ in range(num_tensors):
            name = read_name()
            shape = [read("Q") for _ in range(read("I"))]
            listed.append((name, tuple(reversed(shape)), read("I"), read("Q")))
    start = -(-place // alignment) * alignment
    return {
        name: StoredTensor(path, start + offset, GGUF_TYPES[kind], shape)
        for name, shape, kind, offset in listed
        if kind in GGUF_TYPES
    }


class _Source:
    """What a deferred model is loaded from, shared by its shallow copies."""

    def __init__(
        self, name: str, skeleton: PreTrainedModel, tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.name, self.skeleton, self.tensors = name, skeleton, tensors
        self.loaded: PreTrainedModel | None = None
        self._lock = threading.Lock()

    def load(self, config: Any) -> PreTrainedModel:
        """Return the model, which is loaded once; its modules know this config."""
        with self._lock:
            if self.loaded is None:
                model, _ = load(self.name, "causal")
                own: Any = model.config
                for module in model.modules():
                    if getattr(module, "config", None) is own:
                        module.config = config
                self.loaded = model
        return self.loaded


class Deferred:
    """Put in front of a model's class, until something asks for the model's modules."""

    def __getattr__(self, name: str) -> Any:
        source = vars(self).get("deferred_source")
        if source is not None and (name == "_modules" or name in vars(source.skeleton)["_modules"]):
            self._load()
            return getattr(self, name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        source = vars(self).get("deferred_source")
        is_module = isinstance(value, nn.Module | nn.Parameter)
        if source is not None and (is_module or name in vars(source.skeleton)["_modules"]):
            self._load()
            setattr(self, name, value)  # its class may be another by now
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Load the model: copies and pickles are of an ordinary one."""
        if vars(self).get("deferred_source") is not None:
            self._load()
            return self.__reduce_ex__(protocol)  # its class may be another by now
        return super().__reduce_ex__(protocol)

    def _load(self) -> None:
        real = vars(self)["deferred_source"].load(self.config)  # type: ignore[attr-defined]
        del vars(self)["deferred_source"]
        vars(self)["_modules"] = vars(real)["_modules"]
        if type(self).__bases__[0] is Deferred:
            self.__class__ = type(self).__bases__[1]

    def train(self, mode: bool = True) -> Any:
        """Set the mode, as usual; a model that has it already is not loaded for that."""
        return super().train(mode) if mode or not is_deferred(self) else self  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device("cpu") if is_deferred(self) else super().device  # type: ignore[misc]

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return torch.float32 if is_deferred(self) else super().dtype  # type: ignore[misc]


def stored_parameters(model: Any) -> dict[nn.Parameter, StoredTensor]:
    """Return where a deferred model's weights stand, by the parameters of its skeleton."""
    source = vars(model)["deferred_source"]
    return {weight: source.tensors[name] for name, weight in source.skeleton.named_parameters()}


def load_deferred(name: str) -> PreTrainedModel | None:
    """Return what `load(name, "causal")` returns, with modules made when something asks for them.

    None where that cannot be: if the weights are not in safetensors files of a local folder, with
    exactly one tensor for each parameter.
    """
    place = find_place(name)
    tensors = safetensors_tensors(Path(place)) if Path(place).is_dir() else {}
    if not tensors:
        return None
    with without_bars():
        config = from_pretrained(AutoConfig, place, "config", name=name)
    is_known = type(config) in AutoModelForCausalLM._model_mapping
    if own_class(config.to_dict()) or not is_known or hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        skeleton.tie_weights()  # transformers 5.0 leaves these two to whoever loads weights
        skeleton.config.dtype = torch.float32
    shapes = {each: tuple(weight.shape) for each, weight in skeleton.named_parameters()}
    if shapes != {each: tensor.shape for each, tensor in tensors.items()}:
        return None
    if name in PACKAGED:
        skeleton.config._name_or_path = name
    if (Path(place) / "generation_config.json").is_file():
        skeleton.generation_config = GenerationConfig.from_pretrained(place)
    skeleton.eval().requires_grad_(False)
    own = type(skeleton)
    model: Any = object.__new__(type(own.__name__, (Deferred, own), {"__module__": own.__module__}))
    vars(model).update(vars(skeleton))
    del vars(model)["_modules"]
    vars(model)["deferred_source"] = _Source(name, skeleton, tensors)
    return model
