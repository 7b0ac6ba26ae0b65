"""Carry: drafts from a linear map of what is known anyway, without running a layer.

When token `t` is to be decoded, the last state of the token before it is known from the pass that
chose `t`, and it has seen the whole context. With `e_t` the embedding of `t`, `x_t` its normed last
state and `rms` the root-mean-square norm,

    x_t     ~ B_1 [rms(e_t); x_(t-1)] + b_1
    x_(t+1) ~ B_2 [rms(e_(t+1)); rms(e_t); x_(t-1)] + b_2

and so on: the n-th map has the drafts of those before it among its inputs. Drafts are the best
words of a shortlist, so that a draft costs a small part of what the model's head alone costs.

States enter as the model's final norm leaves them. Where that is a root-mean-square norm with
weights, this is `rms(h)` up to a scale for each dimension, which the map takes up.

Shapes: B rows, D width, S shortlist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F

from deepenough.decoding.drafts import DraftSource, Proposal
from deepenough.decoding.engine import Engine
from deepenough.decoding.rows import Row
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut import files

INDEX, TENSORS = "carry.json", "carry.safetensors"
FORMAT, VERSION = "deepenough-carry", 1


class Carry:
    """Maps `(B_n, b_n)`, `B_n` of shape `(D, (n + 1) D)`, and the words they choose from, those
    that are written most often first."""

    def __init__(
        self,
        maps: Sequence[tuple[Tensor, Tensor]],
        shortlist: Tensor,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.maps = list(maps)
        self.shortlist = shortlist
        self.meta = dict(meta or {})
        width = len(self.maps[0][1]) if self.maps else 0
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            if matrix.shape != (width, (number + 1) * width) or bias.shape != (width,):
                raise ValueError(f"map {number} has the shape {tuple(matrix.shape)}")
        if not self.maps or shortlist.ndim != 1 or not len(shortlist):
            raise ValueError("there is no map, or no word to choose")
        self.width = width

    def state(self, number: int, inputs: Sequence[Tensor]) -> Tensor:
        """What map `number` (from 1) makes of normed embeddings, latest first, and the state."""
        matrix, bias = self.maps[number - 1]
        return F.linear(torch.cat(tuple(inputs), dim=-1), matrix, bias)

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model that these maps were not fitted for."""
        own, other = self.meta.get("model") or {}, adapter.identity()
        known = own.get("fingerprint", other["fingerprint"])
        if self.width != adapter.width or known != other["fingerprint"]:
            raise UserError(
                f"These carry maps were fitted for {own.get('model') or 'another model'}, not for "
                f"{other['model'] or 'this one'}: give the model they belong to, or fit others."
            )

    def of_words(self, number: int | None) -> Carry:
        """The same maps, choosing among the most frequent words only; None for all."""
        return Carry(self.maps, self.shortlist[:number], self.meta)

    def to(self, device: torch.device, dtype: torch.dtype) -> Carry:
        maps = [(matrix.to(device, dtype), bias.to(device, dtype)) for matrix, bias in self.maps]
        return Carry(maps, self.shortlist.to(device), self.meta)

    # -- files -------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `carry.json` and `carry.safetensors`; shortcuts in the same folder stay."""
        tensors = {"shortlist": self.shortlist}
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            tensors |= {f"B.{number}": matrix, f"b.{number}": bias}
        index = {"format": FORMAT, "version": VERSION, "maps": len(self.maps), "meta": self.meta}
        try:
            files.write_described(Path(folder) / TENSORS, tensors, index)
        except (OSError, SafetensorError) as error:
            raise UserError(f"Carry maps cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Carry:
        """Read what `save_pretrained` wrote; safetensors and JSON only."""
        index_path, path = Path(folder) / INDEX, Path(folder) / TENSORS
        if not index_path.is_file() or not path.is_file():
            raise UserError(
                f"{folder} holds no carry maps ({INDEX} and {TENSORS}): give the folder that "
                "Carry.save_pretrained wrote."
            )
        try:
            tensors, index = files.read_described(path, FORMAT, VERSION)
            numbers = range(1, int(index["maps"]) + 1)
            maps = [(tensors[f"B.{number}"], tensors[f"b.{number}"]) for number in numbers]
            return cls(maps, tensors["shortlist"], index["meta"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{index_path} cannot be used ({error}): fit the maps again."
            ) from error


class CarryDraft(DraftSource):
    """The tokens that carry maps predict."""

    def __init__(self, carry: Carry, most: int | None = None) -> None:
        super().__init__(len(carry.maps) if most is None else min(most, len(carry.maps)))
        self.carry = carry
        self._words: tuple[Tensor, Tensor | None] | None = None

    def begin(self, engine: Engine) -> None:
        model = engine.adapter.model
        if self._words is None or not is_like(self._words[0], model):
            self.carry = self.carry.to(model.device, model.dtype)
            self._words = shortlist_head(engine.adapter, self.carry.shortlist)

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        assert self._words is not None
        embed = engine.adapter.model.get_input_embeddings()
        latest_B = torch.tensor([row.context[-1] for row in rows], device=state_BD.device)
        inputs = [state_BD]
        places: list[list[int]] = []
        flops = 0.0
        for number in range(1, self.most + 1):
            inputs.insert(0, F.rms_norm(embed(latest_B), state_BD.shape[-1:]))
            predicted_BD = self.carry.state(number, inputs)
            latest_B = self.carry.shortlist[F.linear(predicted_BD, *self._words).argmax(-1)]
            places.append(latest_B.tolist())
            flops += 2.0 * self.carry.maps[number - 1][0].numel() + 2.0 * self._words[0].numel()
        return Proposal([list(drafts) for drafts in zip(*places, strict=True)], flops=flops)


def is_like(words: Tensor, model: Any) -> bool:
    """Whether words of the head are where and of what the model is, which may have been moved."""
    return bool(words.device == model.device and words.dtype == model.dtype)


def shortlist_head(adapter: Adapter, shortlist: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows of the head that belong to some words: `(S, D)`, and their biases if it has any.

    What a model does to its logits behind the head (scaling, capping) leaves their order alone.
    """
    head: Any = adapter.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != adapter.width:
        raise UserError(
            f"{type(adapter.model).__name__} has no head of one matrix over its states, so that "
            "words cannot be drafted from a shortlist: leave out carry and shortcut drafts."
        )
    bias = getattr(head, "bias", None)
    return weight.detach()[shortlist], None if bias is None else bias.detach()[shortlist]
