"""`Shortcuts`: the linear maps between the layers of one model ("Jump to Conclusions", 2303.09435).

`h_j ~ A_ij h_i (+ b_ij)` for layers `i < j`; states are column vectors in the formula and rows in
tensors. `h_L` is taken before the final norm. Departures from the paper: maps may be affine, and
may be tuned further (`tuned`) so that the prediction, and not the state, comes out right.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.runs import Record
from deepenough.shortcut import card, files, saved
from deepenough.shortcut.collect import check_finite
from deepenough.shortcut.fit import FitSettings, fit_model
from deepenough.shortcut.pairs import Targets, make_plan
from deepenough.shortcut.r2 import R2, Map, r2_from
from deepenough.shortcut.similarity import alignments, cka_table
from deepenough.shortcut.solve import Maps, check_enough, solve
from deepenough.shortcut.statistics import Statistics, check_states
from deepenough.shortcut.windows import Positions

Tuned = dict[int, tuple[Tensor, Tensor]]


class Shortcuts:
    """Maps between layers, and what is known of how they were made (`meta`)."""

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
        """From a layer to the last: maps whose predictions were trained, with their biases."""
        self.table = cka
        """Linear CKA, where it is known."""

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
        progress: Callable[[int, int | None], None] | None = None,
        batch_tokens: int = 2048,
        window: int | None = None,
    ) -> Shortcuts:
        """Run the model over texts and fit the maps in one pass, or in several if memory is short.

        `memory_limit` is in bytes (by default most of what is free). `resume` names a folder where
        the fit is kept every `save_every` seconds, and from which it goes on if it is there
        already; maps then stay there, mapped from disk, until `save_pretrained` copies them.
        `progress` is called with the number of texts read and of texts in all, where that is known.
        Under `torchrun` the processes share the batches, and all of them get the same maps.
        """
        adapter = model if isinstance(model, Adapter) else adapt(model)
        settings = FitSettings(
            positions=positions,
            targets=targets,
            affine=affine,
            ridge=ridge,
            seed=seed,
            batch_tokens=batch_tokens,
            window=window,
        )
        folder = None if resume is None else Path(resume)
        fitted = fit_model(
            adapter, tokenizer, texts, settings, memory_limit, folder, save_every, progress
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
        """Fit maps to given states: `L + 1` tensors `[n, d]`. Maps have the dtype of the states."""
        check_states(states)
        num_layers, (count, width) = len(states) - 1, states[0].shape
        check_enough(count, width, ridge)
        check_finite(states)
        plan = make_plan(num_layers, targets)
        statistics = Statistics(num_layers, width, plan, states[0].device)
        statistics.update(states)
        statistics.finish()
        aligned = alignments(statistics)
        dtype = states[0].dtype if states[0].dtype.itemsize > 4 else torch.float32
        maps, biases, dependent = solve(statistics, affine, ridge, dtype)
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
        """`A` of shape `(d, d)` with `h_j ~ A @ h_i`; the identity for `i = j`."""
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
        """`b` of shape `(d,)`; None for a linear map."""
        self.matrix(i, j)
        return self.biases.get((i, j))

    def apply(self, hidden: Tensor, i: int, j: int, mode: str | None = None) -> Tensor:
        """States `[..., d]` of layer `i` taken to layer `j`.

        `mode` is None for the maps as they were fitted, "id" for none, "tuned" for those whose
        predictions were trained. The result has the dtype and the device of `hidden`.
        """
        if mode == "id" or i == j:
            return hidden
        matrix, bias = self._map(i, j, mode)
        return torch.nn.functional.linear(
            hidden, matrix.to(hidden), None if bias is None else bias.to(hidden)
        )

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
        """The same maps on another device."""
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
        """`(L + 1, L + 1)` table of r^2 on given states; NaN where there is no map."""
        self._check_shape(len(states) - 1, states[0].shape[-1] if len(states) else 0)
        stream = self.r2_stream(mode)
        stream.update(states)
        return stream.table()

    def r2_stream(self, mode: str | None = None) -> R2:
        """The same over states that come batch by batch: `update(states)`, then `table()`."""
        return R2(self.pairs, self._finder(mode))

    def r2_from(self, statistics: Statistics, mode: str | None = None) -> Tensor:
        """The same table from statistics alone, of these states or of others."""
        self._check_shape(statistics.num_layers, statistics.width)
        return r2_from(statistics, self._finder(mode))

    def _finder(self, mode: str | None) -> Callable[[int, int], Map]:
        return lambda i, j: None if mode == "id" else self._map(i, j, mode)

    def cka(self) -> Tensor:
        """`(L + 1, L + 1)` table of linear CKA over the states the maps were fitted on."""
        if self.table is None:
            raise UserError("These shortcuts carry no CKA: fit them here to have it.")
        return self.table

    def record(self) -> Record:
        """What is known of the fit, as a run folder keeps it."""
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
        files.write(Path(folder), *saved.to_files(self))

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], revision: str | None = None
    ) -> Shortcuts:
        """Shortcuts from a folder or the hub; safetensors and JSON only."""
        folder = files.find_folder(name, revision)
        tensors, index = files.read(folder)
        try:
            return cls(**saved.from_files(tensors, index))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder / files.INDEX} does not describe the maps beside it ({error}): fit or "
                "download the shortcuts again."
            ) from error

    def push_to_hub(
        self, name: str, private: bool = False, revision: str | None = None, api: Any = None
    ) -> str:
        """Upload to the hub with a card that says what these are; returns the address."""
        api = api or HfApi()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            (Path(folder) / "README.md").write_text(card.text(name, self), encoding="utf-8")
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
