"""A draft model: an EAGLE-3 head and a linear drafter.

It is all that `deepenough decode tune` makes of a model, saved as safetensors and JSON and tied to
the model's fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepenough.artifacts import load_artifact, save_artifact
from deepenough.config import from_fields
from deepenough.decoding.drafters import LinearDrafter
from deepenough.decoding.eagle3 import Eagle3Config, Eagle3Head
from deepenough.errors import UserError

INDEX, TENSORS = "draft_model.json", "draft_model.safetensors"
FORMAT, VERSION = "deepenough-draft-model", 2


class DraftModel:
    """All that `deepenough decode tune` has made of a model; `meta` says how it drafts."""

    def __init__(
        self, linear_drafter: LinearDrafter, head: Eagle3Head, meta: Mapping[str, Any] | None = None
    ) -> None:
        self.linear_drafter, self.head, self.meta = linear_drafter, head, dict(meta or {})

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write everything into a folder: safetensors and JSON."""
        self.linear_drafter.save_pretrained(folder)
        index = {"format": FORMAT, "version": VERSION, "head": asdict(self.head.config)}
        index |= {"meta": self.meta}
        try:
            save_artifact(Path(folder) / TENSORS, self.head.state_dict(), index)
        except OSError as error:
            raise UserError(f"The draft model cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> DraftModel:
        """Read what `deepenough decode tune` wrote: its run folder, or the folder `model` in it."""
        inner = Path(folder) / "model"
        place = inner if (inner / INDEX).is_file() else Path(folder)
        if not (place / INDEX).is_file():
            raise UserError(
                f"{folder} holds no draft model ({INDEX}): give the folder of a finished "
                "deepenough decode tune, or let it finish with --resume."
            )
        linear = LinearDrafter.from_pretrained(place)
        try:
            tensors, index = load_artifact(place / TENSORS, FORMAT, VERSION)
            if index["version"] != VERSION:
                raise ValueError("an older version made it, with another kind of head")
            with torch.device("meta"):  # no memory before the sizes are known to be right
                head = Eagle3Head(from_fields(Eagle3Config, index["head"]))
            kinds = [
                {name: (each.shape, each.dtype) for name, each in given.items()}
                for given in (tensors, head.state_dict())
            ]
            if kinds[0] != kinds[1]:
                raise ValueError("its tensors are not of the sizes that it names")
            head.load_state_dict(tensors, assign=True)
            head.eval().requires_grad_(False)
            if not int(head.tokens_S.min()) >= 0:
                raise ValueError("tokens to choose are no ids")
            return cls(linear, head, index["meta"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{place / INDEX} cannot be used ({error}): tune it again.") from error
