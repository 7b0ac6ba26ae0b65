"""`Adapted`: changes of low rank to the first layers of a model, and maps from them to the last.

A map `W` of one of the first `k` layers becomes `W + s B A` (LoRA, arXiv 2106.09685). With `h_l`
the state of token `t` behind `l <= k` layers so changed, and `x_t` the model's normed last state in
units of its deviation, every layer `l` has a map

    x_t ~ M_l [rms(h_l); x_(t-1)] + m_l

`x_(t-1)` is known when `t` is decoded, from the pass that chose `t`; for a token that is itself a
guess, it is what the map predicted. How both are trained is said in `train/exit_tune_lora.py`. They
serve drafts alone: the layers that are changed are copies (`first_layers.py`).

Shapes: D width, R rank, I inputs and O outputs of a map.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from deepenough.decoding.first_layers import first_layers
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut import files

INDEX, TENSORS = "lora.json", "lora.safetensors"
FORMAT, VERSION = "deepenough-lora", 1


class Change(NamedTuple):
    """Added to a map: `B A`, the scale in `B`."""

    down_RI: Tensor
    up_OR: Tensor


class Adapted:
    """Changes by the name of what they change, from the list of layers on: `0.mlp.up_proj`."""

    def __init__(
        self,
        changes: Mapping[str, Change],
        maps: Sequence[tuple[Tensor, Tensor]],
        scale_D: Tensor,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.changes, self.maps, self.scale = dict(changes), list(maps), scale_D
        self.meta = dict(meta or {})
        width = len(scale_D)
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            if matrix.shape != (width, 2 * width) or bias.shape != (width,):
                raise ValueError(f"the map of layer {number} has the shape {tuple(matrix.shape)}")
        if not self.maps:
            raise ValueError("there is no map")
        self._copy: tuple[PreTrainedModel, PreTrainedModel] | None = None
        """A model, and its first layers as they were made for it last."""

    @property
    def num_layers(self) -> int:
        return len(self.maps)

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model that this was not made for."""
        own, other = self.meta.get("model") or {}, adapter.identity()
        known = own.get("fingerprint", other["fingerprint"])
        if len(self.scale) != adapter.width or known != other["fingerprint"]:
            raise UserError(
                f"These layers were adapted for {own.get('model') or 'another model'}, not for "
                f"{other['model'] or 'this one'}: give the model they belong to, or adapt others."
            )

    def layers_of(self, adapter: Adapter) -> PreTrainedModel:
        """The model's first layers, copied and changed; made once, however many drafts use it."""
        if self._copy is None or self._copy[0] is not adapter.model:
            short = first_layers(adapter, self.num_layers)
            merge(adapt(short), self.changes)
            self._copy = adapter.model, short
        return self._copy[1]

    # -- files -------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `lora.json` and `lora.safetensors`."""
        tensors = {"scale": self.scale}
        for name, change in self.changes.items():
            tensors |= {f"A.{name}": change.down_RI, f"B.{name}": change.up_OR}
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            tensors |= {f"M.{number}": matrix, f"m.{number}": bias}
        index = {"format": FORMAT, "version": VERSION, "layers": self.num_layers}
        index |= {"changes": list(self.changes), "meta": self.meta}
        try:
            files.write_described(Path(folder) / TENSORS, tensors, index)
        except (OSError, SafetensorError) as error:
            raise UserError(f"Adapted layers cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Adapted:
        """Read what `save_pretrained` wrote; safetensors and JSON only."""
        index_path, path = Path(folder) / INDEX, Path(folder) / TENSORS
        if not index_path.is_file() or not path.is_file():
            raise UserError(
                f"{folder} holds no adapted layers ({INDEX} and {TENSORS}): give the folder that "
                "deepenough exit tune --lora.layers wrote."
            )
        try:
            tensors, index = files.read_described(path, FORMAT, VERSION)
            changes = {
                name: Change(tensors[f"A.{name}"], tensors[f"B.{name}"])
                for name in index["changes"]
            }
            numbers = range(1, int(index["layers"]) + 1)
            maps = [(tensors[f"M.{number}"], tensors[f"m.{number}"]) for number in numbers]
            return cls(changes, maps, tensors["scale"], index["meta"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{index_path} cannot be used ({error}): adapt them again.") from error


def guess(matrix_DZ: Tensor, bias_D: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
    """What a map makes of states `h_l` and of the last states before, in units of the scale."""
    return F.linear(
        torch.cat([F.rms_norm(hidden, hidden.shape[-1:]), before], dim=-1), matrix_DZ, bias_D
    )


def changeable(layers: Sequence[nn.Module]) -> dict[str, nn.Linear | Conv1D]:
    """The maps of layers that can be changed, by name."""
    return {
        name: module
        for name, module in nn.ModuleList(layers).named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


@torch.no_grad()
def merge(adapter: Adapter, changes: Mapping[str, Change]) -> None:
    """Add changes to the weights of a model's layers."""
    modules = changeable(adapter.layers)
    for name, (down_RI, up_OR) in changes.items():
        weight: Any = modules[name].weight
        # Summed in single precision at least, and rounded once.
        exact = torch.promote_types(weight.dtype, torch.float32)
        change = up_OR.to(weight.device, exact) @ down_RI.to(weight.device, exact)
        # Conv1D, of GPT-2, keeps its matrices the other way round.
        change = change.T if isinstance(modules[name], Conv1D) else change
        weight.copy_(weight.to(exact) + change)
