"""`Shortcuts`: the linear maps between the layers of one model ("Jump to Conclusions", 2303.09435).

`h_j ~ A_ij h_i (+ b_ij)` for layers `i < j`; states are column vectors in the formula and rows in
tensors. `h_L` is taken before the final norm. Departures from the paper: maps may be affine, and
may be tuned further (`tuned`) so that the prediction, and not the state, comes out right.

On disk they are `shortcuts.json` and safetensors beside it, with nothing to execute. The JSON file
says what the maps are of and names the files with their hashes, so that a truncated or altered file
is noticed before it is used. Maps are tensors `A.i.j`, biases `b.i.j`, tuned maps `tuned.A.i` and
`tuned.b.i`. A large set of maps is spread over several files. Tensors read back are mapped from
disk and come into memory when they are used.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deepenough.artifacts import load_tensors, save_tensors, sha256, write_json
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.runs import Record
from deepenough.shortcut.fitting import (
    Fit,
    FitOptions,
    Progress,
    Targets,
    make_plan,
    map_tensors,
    pairs_of,
    split_tensors,
)
from deepenough.shortcut.reading import Positions
from deepenough.shortcut.statistics import (
    R2,
    LayerStatistics,
    Maps,
    check_enough,
    check_finite,
    check_states,
    cka_table,
)

INDEX = "shortcuts.json"
FORMAT, VERSION = "deepenough-shortcuts", 1
_FILE_BYTES = 5_000_000_000

#: From a layer to the last: a matrix and a bias.
Tuned = dict[int, tuple[Tensor, Tensor]]


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
    ) -> None:
        self.num_layers, self.width, self.targets = num_layers, width, targets
        self.maps, self.biases = maps, biases or {}
        self.meta = dict(meta or {})
        self.tuned: Tuned = dict(tuned or {})
        self.table = cka

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

    # -- fitting -----------------------------------------------------------------------------

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
        memory_limit: float | None = None,
        resume: str | os.PathLike[str] | None = None,
        save_every: float = 120.0,
        progress: Progress | None = None,
        batch_tokens: int = 2048,
        window: int | None = None,
    ) -> Shortcuts:
        """Run the model over texts and fit the maps in one pass, or in several if memory is short.

        Under `torchrun` the processes share the batches, and all of them get the same maps.

        Args:
            model: A Hugging Face model.
            tokenizer: Its tokenizer.
            texts: Strings; read several times if there are several passes.
            positions: Whether every token of a text counts, or one drawn at random.
            targets: Map every layer to every later one ("all"), or to the last only ("last").
            affine: Whether maps have biases.
            ridge: Penalty on the squared entries of the maps.
            seed: Seed of the random positions.
            memory_limit: Bytes for statistics; by default most of what is free.
            resume: A folder where the fit is saved every `save_every` seconds, and from which it
                goes on if it is there already. Maps then stay there, mapped from disk.
            save_every: Seconds.
            progress: Called with the number of texts read, and of all texts or None.
            batch_tokens: Most tokens in a batch, padding included.
            window: Longest stretch of text that is run at once; by default what the model allows,
                up to 1024 tokens.
        """
        adapter = model if isinstance(model, Adapter) else adapt(model)
        options = FitOptions(positions, targets, affine, ridge, seed, batch_tokens, window)
        fitted = Fit(adapter, tokenizer, texts, options).run(
            memory_limit, None if resume is None else Path(resume), save_every, progress
        )
        return cls(
            adapter.num_layers,
            adapter.width,
            fitted.maps,
            fitted.biases,
            targets=targets,
            cka=cka_table(fitted.aligned),
            meta=fitted.meta,
        )

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
        num_layers, (count, width) = len(states) - 1, states[0].shape
        check_enough(count, width, ridge)
        check_finite(states)
        plan = make_plan(num_layers, targets)
        statistics = LayerStatistics(num_layers, width, plan, states[0].device)
        statistics.update(states)
        aligned = statistics.alignments()
        dtype = states[0].dtype if states[0].dtype.itemsize > 4 else torch.float32
        maps, biases, dependent = statistics.solve(affine, ridge, dtype)
        meta = {"positions": count, "ridge": ridge, "dependent": dependent}
        return cls(
            num_layers,
            width,
            maps,
            biases,
            targets=targets,
            cka=cka_table(aligned),
            meta={"fit": meta},
        )

    # -- use ---------------------------------------------------------------------------------

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

    def apply(self, hidden: Tensor, i: int, j: int, mode: str | None = None) -> Tensor:
        """Take states `[..., d]` of layer `i` to layer `j`.

        Args:
            hidden: The states.
            i: The layer they are of.
            j: The layer they are taken to.
            mode: None for the maps as they were fitted, "id" for none, "tuned" for those whose
                predictions were trained.

        Returns:
            States with the dtype and the device of `hidden`.
        """
        if mode == "id" or i == j:
            return hidden
        matrix, bias = self._map(i, j, mode)
        return F.linear(hidden, matrix.to(hidden), None if bias is None else bias.to(hidden))

    def _map(self, i: int, j: int, mode: str | None) -> tuple[Tensor, Tensor | None]:
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

    def to(self, device: torch.device | str) -> Shortcuts:
        """Return the same maps on another device."""
        return Shortcuts(
            self.num_layers,
            self.width,
            {pair: matrix.to(device) for pair, matrix in self.maps.items()},
            {pair: bias.to(device) for pair, bias in self.biases.items()},
            targets=self.targets,
            cka=self.table,
            meta=self.meta,
            tuned={i: (a.to(device), b.to(device)) for i, (a, b) in self.tuned.items()},
        )

    # -- measures ----------------------------------------------------------------------------

    def r2(self, states: Sequence[Tensor], mode: str | None = None) -> Tensor:
        """Return the `(L + 1, L + 1)` table of r^2 on given states; NaN where there is no map."""
        self._check_shape(len(states) - 1, states[0].shape[-1] if len(states) else 0)
        stream = self.r2_stream(mode)
        stream.update(states)
        return stream.table()

    def r2_stream(self, mode: str | None = None) -> R2:
        """Return r^2 over states that come batch by batch: `update(states)`, then `table()`."""
        return R2(self.pairs, lambda i, j: None if mode == "id" else self._map(i, j, mode))

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

    # -- the model they belong to ------------------------------------------------------------

    def _check_shape(self, num_layers: int, width: int) -> None:
        if (num_layers, width) != (self.num_layers, self.width):
            raise UserError(
                f"These shortcuts are of {self.num_layers} layers and width {self.width}, but "
                f"{num_layers} layers of width {width} were given."
            )

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model that these maps were not fitted for."""
        self._check_shape(adapter.num_layers, adapter.width)
        own = self.meta.get("model") or {}
        other = adapter.identity()
        if own.get("fingerprint", other["fingerprint"]) == other["fingerprint"]:
            return
        raise UserError(
            f"These shortcuts were fitted for {_name(own)}, and the weights of {_name(other)} are "
            "others: give the model they belong to, or fit shortcuts for this one."
        )

    # -- files -------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `shortcuts.json` and safetensors, as `from_pretrained` and the hub take them."""
        tensors = map_tensors(self.maps, self.biases)
        for i, (matrix, bias) in sorted(self.tuned.items()):
            tensors |= {f"tuned.A.{i}": matrix, f"tuned.b.{i}": bias}
        index = {
            "num_layers": self.num_layers,
            "width": self.width,
            "affine": self.affine,
            "targets": self.targets,
            "cka": None if self.table is None else _rows(self.table),
            "meta": self.meta,
        }
        _write(Path(folder), tensors, index)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], revision: str | None = None
    ) -> Shortcuts:
        """Read shortcuts from a folder or the hub; safetensors and JSON only."""
        folder = _find_folder(name, revision)
        tensors, index = _read(folder)
        try:
            return cls(**_arguments(tensors, index))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder / INDEX} does not describe the maps beside it ({error}): fit or "
                "download the shortcuts again."
            ) from error

    def push_to_hub(
        self, name: str, private: bool = False, revision: str | None = None, api: Any = None
    ) -> str:
        """Upload to the hub, with a card that says what these are, and return the address."""
        api = api or HfApi()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            (Path(folder) / "README.md").write_text(_card(name, self), encoding="utf-8")
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=name,
                folder_path=folder,
                revision=revision,
                commit_message="Upload shortcuts",
            )
        return str(address)


def _name(identity: Mapping[str, Any]) -> str:
    revision = identity.get("revision")
    name = identity.get("model") or "a model without a name"
    return f"{name} (revision {revision})" if revision else str(name)


# -- files ---------------------------------------------------------------------------------------


def _write(folder: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any]) -> None:
    """Write all files, the index after those it names, in place of shortcuts that are there.

    The tensors may be mapped from the very files that are replaced.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = _parts(tensors)
        files = {}
        for number, names in enumerate(parts, start=1):
            of = "" if len(parts) == 1 else f"-{number:05d}-of-{len(parts):05d}"
            path = folder / f"shortcuts{of}.safetensors"
            save_tensors(path, {name: tensors[name] for name in names})
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        content = {"format": FORMAT, "version": VERSION, **index, "files": files}
        write_json(folder / INDEX, content)
        for stale in folder.glob("shortcuts*.safetensors"):
            if stale.name not in files:
                stale.unlink()
    except (OSError, SafetensorError) as error:
        raise UserError(f"Shortcuts cannot be written to {folder}: {error}.") from error


def _parts(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and index of a folder, if its files are as they were written."""
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} holds no shortcuts: there is no {INDEX}; give the folder that "
            "Shortcuts.save_pretrained wrote."
        )
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if index["version"] > VERSION:
            raise UserError(
                f"{folder / INDEX} was written by a newer deepenough: upgrade this one to read it."
            )
        files = {str(name): str(file["sha256"]) for name, file in index["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / INDEX} cannot be read ({error}): fit or download the shortcuts again."
        ) from error
    tensors: dict[str, Tensor] = {}
    for name, expected in files.items():
        path = folder / name
        if path.name != name or not path.is_file():
            raise UserError(f"{path} is missing: fit or download the shortcuts again.")
        if sha256(path) != expected:
            raise UserError(
                f"{path} is not the file that {INDEX} describes, but was truncated or altered: "
                "fit or download the shortcuts again."
            )
        tensors |= load_tensors(path)[0]
    return tensors, index


def _find_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return a folder of shortcuts: on this disk, or downloaded from the hub."""
    if Path(name).exists():
        return Path(name)
    if os.path.isabs(name) or str(name).startswith(".") or str(name).count("/") > 1:
        raise UserError(
            f"There is no folder {name}: give one that Shortcuts.save_pretrained wrote."
        )
    try:
        return Path(
            snapshot_download(
                str(name), revision=revision, allow_patterns=[INDEX, "shortcuts*.safetensors"]
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name} is neither a folder here nor shortcuts that the hub gives "
            f"({type(error).__name__}): give a folder, or look at the name and the network."
        ) from error


def _arguments(tensors: dict[str, Tensor], index: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Shortcuts`; ValueError, KeyError or TypeError if any is missing."""
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


def _rows(table: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(x) else x for x in row] for row in table.tolist()]


def _table(rows: list[list[float | None]]) -> Tensor:
    values = [[math.nan if x is None else float(x) for x in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


_CARD = """---
library_name: deepenough
tags: [deepenough, shortcuts, early-exit, interpretability]
{base}---

# Shortcuts{of}

{kind} maps between the layers of a model ("Jump to Conclusions", arXiv 2303.09435): {pairs} pairs
of {num_states} states of width {width}{positions}.

```python
from deepenough import Shortcuts

shortcuts = Shortcuts.from_pretrained("{name}")
hidden = shortcuts.apply(hidden, 0, {num_layers})  # from the input of the first layer to the last
```
"""


def _card(name: str, shortcuts: Shortcuts) -> str:
    """Return the README of a repository that holds `shortcuts`."""
    model = (shortcuts.meta.get("model") or {}).get("model")
    positions = shortcuts.meta.get("fit", {}).get("positions")
    is_hub_name = (
        bool(model) and str(model).count("/") == 1 and not str(model).startswith((".", "/"))
    )
    return _CARD.format(
        base=f"base_model: {model}\n" if is_hub_name else "",
        of=f" for {model}" if is_hub_name else "",
        kind="Affine" if shortcuts.affine else "Linear",
        pairs=len(shortcuts.maps),
        num_states=shortcuts.num_layers + 1,
        num_layers=shortcuts.num_layers,
        width=shortcuts.width,
        positions=f", fitted on {positions:,} positions" if positions else "",
        name=name,
    )
