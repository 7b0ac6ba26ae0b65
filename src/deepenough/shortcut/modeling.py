"""`Shortcuts`: the linear maps between the layers of one model ("Jump to Conclusions", 2303.09435).

`h_j ~ A_ij h_i (+ b_ij)` for layers `i < j`; states are column vectors in the formula and rows in
tensors. `h_L` is taken before the final norm. Departures from the paper: maps may be affine, and
may be tuned further (`tuned`) so that the prediction, and not the state, comes out right.

On disk they are `shortcuts.safetensors`, and `shortcuts.json` beside it, which says what the maps
are of and holds a checksum, so that a truncated or altered file is noticed before it is used. Maps
are tensors `A.i.j`, biases `b.i.j`, tuned maps `tuned.A.i` and `tuned.b.i`, maps of
sub-modules `part.A. ...`. Tensors read back are mapped from disk and come into memory when they are
used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deepenough.artifacts import load_artifact, save_artifact
from deepenough.config import bounded, from_fields
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import OneDnnProducts
from deepenough.hf.loading import is_only_local
from deepenough.runs import Record
from deepenough.shortcut.fitting import FitOptions, Progress, collect
from deepenough.shortcut.reading import Positions
from deepenough.shortcut.statistics import (
    R2,
    LayerStatistics,
    Maps,
    Targets,
    check_finite,
    check_states,
    layer_pairs,
)
from deepenough.shortcut.submodules import Submodules, SubmoduleStatistics

INDEX, TENSORS = "shortcuts.json", "shortcuts.safetensors"
FORMAT, VERSION = "deepenough-shortcuts", 2

#: From a layer to the last: a matrix and a bias.
Tuned = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class _Index:
    """What the JSON file says beside its format and checksum."""

    num_layers: int = bounded(ge=1)
    width: int = bounded(ge=1)
    affine: bool
    targets: Targets
    meta: dict[str, Any]


class _KeptMap(NamedTuple):
    """A map on the device and in the dtype of the states that it was last applied to."""

    source: Tensor
    matrix: Tensor
    bias: Tensor | None

    def serves(self, source: Tensor, hidden: Tensor) -> bool:
        """Return whether it is the copy of a map that these states need."""
        place = self.matrix.device, self.matrix.dtype
        return self.source is source and place == (hidden.device, hidden.dtype)


class Shortcuts:
    """Maps between the layers of one model.

    Attributes:
        num_layers: Number of layers `L`; there are `L + 1` states.
        width: Width `d` of the states.
        targets: "all" if there is a map between every two layers, "last" if only to the last.
        maps: `A_ij` by pair `(i, j)`.
        biases: `b_ij` by pair; empty for linear maps.
        tuned: From a layer to the last: maps whose predictions were trained, with their biases.
        table: Linear CKA of all pairs, or None where it is not known.
        submodules: Linear maps of the parts inside the blocks, or None where they were not fitted.
        meta: How the maps were made: the model's identity, the texts, the options of the fit.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        maps: Maps,
        biases: Maps | None = None,
        *,
        targets: Targets = "all",
        cka: Tensor | None = None,
        meta: Mapping[str, Any] | None = None,
        tuned: Tuned | None = None,
        submodules: Submodules | None = None,
    ) -> None:
        self.num_layers, self.width, self.targets = num_layers, width, targets
        self.maps, self.biases = maps, biases or {}
        self.meta = dict(meta or {})
        self.tuned: Tuned = dict(tuned or {})
        self.table, self.submodules = cka, submodules
        self._kept: dict[tuple[int, int, str | None], _KeptMap] = {}

    @property
    def affine(self) -> bool:
        """Whether the maps have biases."""
        return bool(self.biases)

    @property
    def mode(self) -> str:
        """What the closed-form maps are called in records and pictures."""
        return "affine" if self.affine else "mat"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs `(i, j)` that have a map."""
        return sorted(self.maps)

    @classmethod
    def fit(
        cls,
        model: PreTrainedModel | Adapter,
        tokenizer: Any,
        texts: Iterable[str],
        positions: Positions = "all",
        targets: Targets = "all",
        affine: bool = False,
        ridge: float = 0.0,
        seed: int = 0,
        *,
        resume: str | os.PathLike[str] | None = None,
        save_every: float = 120.0,
        progress: Progress | None = None,
        batch_tokens: int = 2048,
        window: int | None = None,
        submodules: bool = False,
        memory: float | None = None,
    ) -> Shortcuts:
        """Run the model over texts and fit the maps in one pass.

        Under `torchrun` the processes share the batches, and all of them get the same maps. The
        options of the same names in `MapsConfig` say what is fitted, on batches of `batch_tokens`
        at most, padding included; `seed` draws the random positions. In the folder `resume` the
        sums are saved every `save_every` seconds and at the end, and from there a fit goes on.
        Sums that are larger than `memory` GB, by default what is free, are kept in files.
        `progress` is called with the number of texts read, and of all texts or None.
        """
        began = time.perf_counter()
        adapter = model if isinstance(model, Adapter) else adapt(model)
        options = FitOptions(positions, targets, affine, ridge, seed, batch_tokens, window)
        folder = Path(resume) if resume else None
        parts = SubmoduleStatistics(adapter) if submodules else None
        statistics, meta = collect(
            adapter,
            tokenizer,
            texts,
            options,
            folder,
            save_every,
            progress,
            parts,
            None if memory is None else memory * 1e9,
        )
        shortcuts = cls._from_statistics(statistics, affine, ridge, adapter.model.dtype, meta)
        if parts is not None:
            shortcuts.submodules = Submodules.from_statistics(parts, adapter, affine, ridge)
            shortcuts.submodules.texts = meta["data"]["fingerprint"]
        shortcuts.meta["fit"]["seconds"] = round(time.perf_counter() - began, 3)
        return shortcuts

    @classmethod
    def fit_states(
        cls,
        states: Sequence[Tensor],
        targets: Targets = "all",
        affine: bool = False,
        ridge: float = 0.0,
    ) -> Shortcuts:
        """Fit maps to given states, `L + 1` tensors `[n, d]`; maps have the dtype of the states."""
        check_states(states)
        check_finite(states)
        width = states[0].shape[1]
        statistics = LayerStatistics(len(states) - 1, width, targets, states[0].device)
        statistics.update(states)
        meta = {"fit": {"ridge": ridge}}
        return cls._from_statistics(statistics, affine, ridge, states[0].dtype, meta)

    @classmethod
    def _from_statistics(
        cls,
        statistics: LayerStatistics,
        affine: bool,
        ridge: float,
        dtype: torch.dtype,
        meta: dict[str, Any],
    ) -> Shortcuts:
        """Solve for all maps, in float32 at least; `dtype` is that of the states."""
        count, cka = statistics.count, statistics.cka()
        maps, biases, dependent = statistics.solve(affine, ridge, dtype)
        meta["fit"] |= {"positions": count, "dependent": dependent}
        layers, width = statistics.num_layers, statistics.width
        about: dict[str, Any] = {"targets": statistics.targets, "cka": cka, "meta": meta}
        return cls(layers, width, maps, biases, **about)

    def matrix(self, i: int, j: int) -> Tensor:
        """Return `A` of shape `(d, d)` with `h_j ~ A @ h_i`; the identity for `i = j`."""
        if i == j and 0 <= i <= self.num_layers:
            some = next(iter(self.maps.values()))
            return torch.eye(self.width, dtype=some.dtype, device=some.device)
        if (i, j) not in self.maps:
            known = "every later layer" if self.targets == "all" else f"layer {self.num_layers}"
            raise UserError(
                f"There is no map from layer {i} to layer {j}: these shortcuts lead from layers "
                f"0 to {self.num_layers - 1} to {known}."
            )
        return self.maps[i, j]

    def bias(self, i: int, j: int) -> Tensor | None:
        """Return `b` of shape `(d,)`; None for a linear map."""
        self.matrix(i, j)
        return self.biases.get((i, j))

    def apply(
        self, hidden: Tensor, i: int, j: int, mode: str | None = None, keep: bool = False
    ) -> Tensor:
        """Take states `[..., d]` of layer `i` to layer `j`, with their own dtype and device.

        The mode is None for the maps as they were fitted, "id" for none, "tuned" for those whose
        predictions were trained. A map that is on another device or of another dtype is copied;
        with `keep`, the copy is kept for the next time.
        """
        if mode == "id" or i == j:
            return hidden
        source, bias = self.pair(i, j, mode)
        found = self._kept.get((i, j, mode))
        if found is None or not found.serves(source, hidden):
            moved = None if bias is None else bias.to(hidden)
            found = _KeptMap(source, source.to(hidden), moved)
            if keep and found.matrix is not source:
                self._kept[i, j, mode] = found
        return F.linear(hidden, found.matrix, found.bias)

    def pair(self, i: int, j: int, mode: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Return matrix and bias of a map; the mode is that of `apply`, but "id"."""
        if mode == "tuned":
            if j != self.num_layers or i not in self.tuned:
                raise UserError(
                    f"There is no tuned map from layer {i} to layer {j}: tune the shortcuts first."
                )
            return self.tuned[i]
        if mode not in (None, self.mode):
            raise UserError(
                f"The maps of these shortcuts are {self.mode!r}, not {mode!r}: fit others."
            )
        return self.matrix(i, j), self.bias(i, j)

    def r2(self, states: Sequence[Tensor], mode: str | None = None) -> Tensor:
        """Return the `(L + 1, L + 1)` table of r^2 on given states; NaN where there is no map."""
        num_layers, width = len(states) - 1, states[0].shape[-1] if len(states) else 0
        if (num_layers, width) != (self.num_layers, self.width):
            raise UserError(
                f"These shortcuts are of {self.num_layers} layers and width {self.width}, but "
                f"{num_layers} layers of width {width} were given."
            )
        stream = self.r2_stream(mode)
        with torch.no_grad(), OneDnnProducts():
            stream.update(states)
        return stream.table()

    def r2_stream(self, mode: str | None = None) -> R2:
        """Return r^2 over states that come batch by batch: `update(states)`, then `table()`."""
        return R2(self.pairs, lambda hidden, i, j: self.apply(hidden, i, j, mode))

    def cka(self) -> Tensor:
        """Return the `(L + 1, L + 1)` table of linear CKA over the states of the fit."""
        if self.table is None:
            raise UserError("These shortcuts carry no CKA: fit them here to have it.")
        return self.table

    def record(self) -> Record:
        """Return what is known of the fit, as a run folder keeps it."""
        model = self.meta.get("model") or {}
        values = {"model": model.get("model"), "pairs": len(self.maps), "mode": self.mode}
        return Record(0, "fit", values | self.meta.get("fit", {}) | self.meta.get("data", {}))

    @property
    def made_for(self) -> dict[str, Any]:
        """Return what is known of the model they were fitted for, as `Adapter.identity` has it."""
        shape = {"layers": self.num_layers, "width": self.width}
        return shape | (self.meta.get("model") or {})

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `shortcuts.json` and safetensors, as `from_pretrained` takes them."""
        tensors = {f"A.{i}.{j}": matrix for (i, j), matrix in sorted(self.maps.items())}
        tensors |= {f"b.{i}.{j}": bias for (i, j), bias in sorted(self.biases.items())}
        for i, (matrix, bias) in sorted(self.tuned.items()):
            tensors |= {f"tuned.A.{i}": matrix, f"tuned.b.{i}": bias}
        if self.submodules is not None:
            tensors |= self.submodules.tensors()
        if self.table is not None:
            tensors["cka"] = self.table
        own = {field.name: getattr(self, field.name) for field in fields(_Index)}
        index = {"format": FORMAT, "version": VERSION, **own}
        try:
            save_artifact(Path(folder) / TENSORS, tensors, index)
        except OSError as error:
            raise UserError(f"Shortcuts cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], revision: str | None = None
    ) -> Shortcuts:
        """Read what `save_pretrained` wrote, safetensors and JSON only, from a folder or the hub.

        There, `revision` is a branch, tag or commit.
        """
        folder = _find_folder(name, revision)
        if not (folder / INDEX).is_file():
            raise UserError(
                f"{folder} holds no shortcuts: there is no {INDEX}; give a folder that "
                "Shortcuts.save_pretrained wrote."
            )
        try:
            return _from_files(*load_artifact(folder / TENSORS, FORMAT, VERSION))
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"The shortcuts in {folder} cannot be read, as they are damaged or of another "
                f"version ({error!s:.200}): fit them again."
            ) from error


def _find_folder(name: str | os.PathLike[str], revision: str | None) -> Path:
    """Return a folder of shortcuts: on this disk, or downloaded from the hub."""
    if Path(name).exists() or os.path.isabs(name) or str(name).count("/") != 1:
        return Path(name)
    try:
        options: dict[str, Any] = {"allow_patterns": [INDEX, TENSORS], "revision": revision}
        options["local_files_only"] = is_only_local(str(name))
        return Path(snapshot_download(str(name), **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name} is neither a folder here nor shortcuts that the hub gives "
            f"({type(error).__name__}): give a folder, or look at the name and the network."
        ) from error


def _from_files(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> Shortcuts:
    """Return the shortcuts that files hold; ValueError, KeyError or TypeError if they are wrong."""
    outer = ("format", "version", "sha256")
    index = from_fields(_Index, {k: v for k, v in content.items() if k not in outer})
    last, width, left = index.num_layers, index.width, dict(tensors)

    def take(name: str, *shape: int) -> Tensor:
        tensor = left.pop(name)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)} and is {tensor.dtype}")
        return tensor

    # Counted before they are listed: a number in a file costs nothing, a list of so many does.
    if len(left) < (last * (last + 1) // 2 if index.targets == "all" else last):
        raise ValueError("maps are missing")
    pairs = layer_pairs(last, index.targets)
    maps = {(i, j): take(f"A.{i}.{j}", width, width) for i, j in pairs}
    biases = {(i, j): take(f"b.{i}.{j}", width) for i, j in pairs if index.affine}
    tuned = {
        i: (take(f"tuned.A.{i}", width, width), take(f"tuned.b.{i}", width))
        for i in range(last)
        if f"tuned.A.{i}" in left
    }
    cka = take("cka", last + 1, last + 1) if "cka" in left else None
    parts = Submodules.take_from(left, {})
    if left:
        raise ValueError(f"{min(left)!r:.40} is no map of these layers")
    about: dict[str, Any] = {"targets": index.targets, "meta": index.meta}
    found = Shortcuts(last, width, maps, biases, cka=cka, tuned=tuned, **about)
    found.record()  # refuses a meta that is none
    if parts is not None:
        parts.identity, parts.texts = found.made_for, found.meta.get("data", {}).get("fingerprint")
        found.submodules = parts
    return found
