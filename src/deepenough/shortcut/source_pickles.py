"""Import the matrices that the code of "Jump to Conclusions" publishes.

`i_j.pickle` maps layer `i` to layer `j`; `pi_a_b.pickle` maps one part inside block `i`, from what
it reads to what it returns (`submodules.SOURCE_PLACES` says which). Each file is one pickled
tensor, the `coef_` of scikit-learn's LinearRegression and so `A_ij` itself (or a list of it and the
intercept). A pickle can run any code when it is opened, hence a reader that knows three names: two
that build a tensor, and one that reads its numbers, for which torch's own restricted reader stands
in. Any other name ends the import before anything has run. A tensor is refused that shows more
numbers than are in the file.
"""

import io
import logging
import math
import os
import pickle
import pickletools
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.normal_equations import AffineMap
from deepenough.shortcut.statistics import Maps, Targets, layer_pairs
from deepenough.shortcut.submodules import SOURCE_PLACES, Place, Submodules

log = logging.getLogger("deepenough")

_NAME = re.compile(
    r"(?:(?P<i>\d{1,4})_(?P<j>\d{1,4})|p(?P<block>\d{1,4})_(?:0_1|1_2|2_3|3_4|4_5|5_6)(?<=(?P<b>\d)))"
    r"\.pickle",
    re.ASCII,
)


def import_source(folder: str | os.PathLike[str]) -> Shortcuts:
    """Return shortcuts from a folder of `i_j.pickle`: all pairs, or all layers to the last.

    With them come the maps of sub-modules, of each kind of which all blocks have a `pi_a_b.pickle`.
    """
    maps: Maps = {}
    biases: Maps = {}
    parts: dict[Place, AffineMap] = {}
    width = 0
    names = sorted(Path(folder).glob("*_*.pickle")) if Path(folder).is_dir() else []
    for path in filter(Path.is_file, names):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        matrix, bias = _map(path)
        width = width or len(matrix)
        if matrix.shape != (width, width):
            raise UserError(
                f"{path} is not a matrix of {width} x {width} like the first: give a folder of one "
                "model."
            )
        if match["block"]:
            kind, number = SOURCE_PLACES[int(match["b"])]
            parts[kind, int(match["block"]), number] = AffineMap(matrix, bias)
            continue
        pair = int(match["i"]), int(match["j"])
        maps[pair] = matrix
        if bias is not None:
            biases[pair] = bias
    if not maps:
        raise UserError(f"{folder} has no file such as 0_12.pickle: give the folder of matrices.")
    num_layers = max(target for _, target in maps)
    targets: Targets = "all" if maps.keys() == layer_pairs(num_layers) else "last"
    if maps.keys() != layer_pairs(num_layers, targets):
        source, target = min(layer_pairs(num_layers) - maps.keys())
        raise UserError(
            f"{folder} lacks {source}_{target}.pickle: give all pairs of layers, or those to the "
            "last layer alone."
        )
    if biases and biases.keys() != maps.keys():
        raise UserError(f"Some maps of {folder} have an intercept and some have none.")
    every = {(kind, i, n) for i in range(num_layers) for kind, n in SOURCE_PLACES.values()}
    if incomplete := {kind for kind, *_ in every - parts.keys()} & {kind for kind, *_ in parts}:
        log.warning("%s lacks some maps of %s: none is taken.", folder, ", ".join(incomplete))
        parts = {place: part for place, part in parts.items() if place[0] not in incomplete}
    meta = {"imported": Path(folder).name}
    found = Shortcuts(num_layers, width, maps, biases, targets=targets, meta=meta)
    found.submodules = Submodules(parts, found.made_for) if parts else None
    return found


def _map(path: Path) -> tuple[Tensor, Tensor | None]:
    match load_tensors_only(path):
        case Tensor() as matrix if matrix.ndim == 2:
            parts = [matrix]
        case [Tensor() as matrix, Tensor() as bias] if matrix.ndim == 2 and bias.ndim == 1:
            parts = [matrix, bias]
        case _:
            raise UserError(f"{path} does not hold one matrix: give the source's i_j.pickle files.")
    if not all(part.is_floating_point() and part.isfinite().all() for part in parts):
        raise UserError(f"{path} holds numbers that are not finite: fit its map again.")
    return parts[0].contiguous().clone(), parts[1].clone() if parts[1:] else None


def load_tensors_only(path: str | os.PathLike[str]) -> Any:
    """Return what a pickle holds, if it holds tensors and lists of them and nothing else."""
    try:
        content = Path(path).read_bytes()
        for opcode, argument, _ in pickletools.genops(content):
            # A place in the memo takes memory up to it, whether the file is that long or not.
            if opcode.name in _REFUSED or (
                "PUT" in opcode.name and int(argument or 0) > len(content)
            ):
                raise ValueError(f"{opcode.name} is no part of a tensor")
        return _TensorUnpickler(io.BytesIO(content)).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle fails in ways that have no end
        raise UserError(
            f"{path} is no pickle of a tensor, or is damaged: {error!s:.99}."
        ) from error


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise UserError(
                f"The pickle names {module[:40]}.{name[:40]}, which is no part of a tensor: it was "
                "not opened; import only files that come from the source's code."
            )
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("The pickle refers to something outside itself: it was not opened.")


def _read_storage(content: bytes) -> Tensor:
    """Return the numbers of a storage, which stand at the end of what torch writes of it.

    torch makes room for as many numbers as the file names. If the file has fewer, that room shows
    what was in memory before: only numbers that are in the file are taken.
    """
    if content.startswith(b"PK"):
        raise ValueError("an archive, which could hold more than its size")
    storage = torch.load(io.BytesIO(content), weights_only=True)
    if not isinstance(storage, torch.TypedStorage):
        raise ValueError("no numbers where a tensor's should be")
    numbers: Tensor = torch._utils._rebuild_tensor(storage, 0, (0,), (1,))
    memory = numbers.untyped_storage()
    if memory.nbytes() > len(content) or not content.endswith(numbers.set_(memory).numpy().data):
        raise ValueError("its numbers are not in it")
    return numbers


def _rebuild(
    numbers: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Tensor:
    """Return a view of numbers that lies within them and shows none twice; no hook is run."""
    if not isinstance(numbers, Tensor) or min(size) < 1 or min(stride) < 1 or offset < 0:
        raise ValueError("a view of nothing, or one that goes backwards")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= len(numbers) or math.prod(size) > len(numbers):
        raise ValueError("a view of more numbers than there are")
    return numbers.as_strided(size, stride, offset)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch.storage", "_load_from_bytes"): _read_storage,
    ("collections", "OrderedDict"): OrderedDict,
}
#: Ways of a pickle to make and to change objects other than by calling what is allowed.
_REFUSED = {"BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}
