"""Shortcuts as named tensors and an index of plain values, and back, checked on the way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepenough.shortcut.pairs import make_plan, pairs_of
from deepenough.shortcut.solve import Maps

if TYPE_CHECKING:
    from deepenough.shortcut.shortcuts import Shortcuts


def to_files(shortcuts: Shortcuts) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and all the rest as JSON can say it."""
    tensors = map_tensors(shortcuts.maps, shortcuts.biases)
    for i, (matrix, bias) in sorted(shortcuts.tuned.items()):
        tensors |= {f"tuned.A.{i}": matrix, f"tuned.b.{i}": bias}
    index = {
        "num_layers": shortcuts.num_layers,
        "width": shortcuts.width,
        "affine": shortcuts.affine,
        "targets": shortcuts.targets,
        "cka": None if shortcuts.table is None else _rows(shortcuts.table),
        "meta": shortcuts.meta,
    }
    return tensors, index


def from_files(tensors: dict[str, Tensor], index: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Shortcuts`; ValueError, KeyError or TypeError if something is missing."""
    num_layers, width = int(index["num_layers"]), int(index["width"])
    maps, biases, others = split_tensors(tensors)
    for name, tensor in tensors.items():
        expected = (width, width) if ".A." in f".{name}" else (width,)
        if tensor.shape != expected:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}")
    pairs = set(pairs_of(make_plan(num_layers, index["targets"])))
    if maps.keys() != pairs or biases.keys() != (pairs if index["affine"] else set()):
        raise ValueError("maps are missing or too many")
    tuned = {
        int(name.removeprefix("tuned.A.")): (matrix, others[name.replace(".A.", ".b.")])
        for name, matrix in others.items()
        if name.startswith("tuned.A.")
    }
    if len(others) != 2 * len(tuned) or not all(0 <= i < num_layers for i in tuned):
        raise ValueError("tuned maps are missing or too many")
    return {
        "num_layers": num_layers,
        "width": width,
        "maps": maps,
        "biases": biases,
        "targets": index["targets"],
        "cka": None if index["cka"] is None else _table(index["cka"]),
        "meta": dict(index["meta"]),
        "tuned": tuned,
    }


def map_tensors(maps: Maps, biases: Maps) -> dict[str, Tensor]:
    """Maps and biases by name."""
    tensors = {f"A.{i}.{j}": matrix for (i, j), matrix in sorted(maps.items())}
    return tensors | {f"b.{i}.{j}": bias for (i, j), bias in sorted(biases.items())}


def split_tensors(tensors: dict[str, Tensor]) -> tuple[Maps, Maps, dict[str, Tensor]]:
    """Maps, biases, and what is neither."""
    maps: Maps = {}
    biases: Maps = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match name.split("."):
            case ["A", i, j]:
                maps[int(i), int(j)] = tensor
            case ["b", i, j]:
                biases[int(i), int(j)] = tensor
            case _:
                others[name] = tensor
    return maps, biases, others


def _rows(table: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(x) else x for x in row] for row in table.tolist()]


def _table(rows: list[list[float | None]]) -> Tensor:
    values = [[math.nan if x is None else float(x) for x in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64)
