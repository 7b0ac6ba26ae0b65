"""Import the matrices that the code of "Jump to Conclusions" publishes: `i_j.pickle`.

Each file is one pickled tensor, the `coef_` of scikit-learn's LinearRegression and so `A_ij` itself
(or a list of it and the intercept). A pickle can run any code when it is opened, hence a reader
that knows three names: two that build a tensor, and one that reads its numbers, for which torch's
own restricted reader stands in. Any other name ends the import before anything has run.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.statistics import Maps, Targets, layer_pairs

_NAME = re.compile(r"(\d+)_(\d+)\.pickle")


def import_source(folder: str | os.PathLike[str]) -> Shortcuts:
    """Shortcuts from a folder of `i_j.pickle`: all pairs, or all layers to the last."""
    maps: Maps = {}
    biases: Maps = {}
    names = sorted(Path(folder).glob("*_*.pickle")) if Path(folder).is_dir() else []
    for path in names:
        if match := _NAME.fullmatch(path.name):  # the source's `pi_a_b.pickle` are of sub-modules
            pair = int(match[1]), int(match[2])
            maps[pair], bias = _map(path)
            if bias is not None:
                biases[pair] = bias
    if not maps:
        raise UserError(f"{folder} has no file such as 0_12.pickle: give the folder of matrices.")
    width = len(next(iter(maps.values())))
    if odd := [pair for pair, matrix in maps.items() if matrix.shape != (width, width)]:
        raise UserError(
            f"{folder}/{odd[0][0]}_{odd[0][1]}.pickle is not a matrix of {width} x {width} like "
            "the first: give a folder of one model."
        )
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
    return Shortcuts(
        num_layers, width, maps, biases, targets=targets, meta={"imported": Path(folder).name}
    )


def _map(path: Path) -> tuple[Tensor, Tensor | None]:
    match load_tensors_only(path):
        case Tensor() as matrix if matrix.ndim == 2:
            return matrix.contiguous().clone(), None
        case [Tensor() as matrix, Tensor() as bias] if matrix.ndim == 2 and bias.ndim == 1:
            return matrix.contiguous().clone(), bias.clone()
        case _:
            raise UserError(f"{path} does not hold one matrix: give the source's i_j.pickle files.")


def load_tensors_only(path: str | os.PathLike[str]) -> Any:
    """Return what a pickle holds, if it holds tensors and lists of them and nothing else."""
    try:
        with open(path, "rb") as file:
            return _TensorUnpickler(file).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle fails in ways that have no end
        raise UserError(f"{path} is not a pickle of a tensor, or is damaged: {error}.") from error


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise UserError(
                f"The pickle names {module}.{name}, which is no part of a tensor: it was not "
                "opened; import only files that come from the source's code."
            )
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("The pickle refers to something outside itself: it was not opened.")


def _read_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def _rebuild(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Any:
    if not isinstance(storage, torch.TypedStorage | torch.UntypedStorage):
        raise ValueError("no numbers where a tensor's should be")
    # Checks that the view lies within the storage; the hooks that follow are not run.
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch.storage", "_load_from_bytes"): _read_storage,
    ("collections", "OrderedDict"): OrderedDict,
}
