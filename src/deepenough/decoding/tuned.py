"""`Tuned`: all that `deepenough exit tune` has made of a model, in one folder.

Carry maps with their shortlist, the draft head that started from them, shortcuts if there were any,
and which drafts are fastest on the machine where this was measured
(`choice.json`). Safetensors and JSON only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from deepenough.decoding.drafters import LinearDrafter
from deepenough.decoding.head import DraftHead, HeadShape
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut import files
from deepenough.shortcut.modeling import Shortcuts

INDEX, TENSORS, CHOICE = "head.json", "head.safetensors", "choice.json"
SHORTCUTS = "shortcuts"
FORMAT, VERSION = "deepenough-draft-head", 1


class Tuned:
    def __init__(
        self,
        carry: LinearDrafter,
        head: DraftHead,
        meta: Mapping[str, Any] | None = None,
        choice: Mapping[str, Any] | None = None,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self.carry, self.head, self.shortcuts = carry, head, shortcuts
        self.meta = dict(meta or {})
        self.choice = dict(choice or {})
        """Arguments of `speculate` that were fastest, under "drafts", and how that was found."""

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model that this was not made for."""
        own, other = self.carry.meta.get("model") or {}, adapter.identity()
        if adapter.width != self.carry.width or own.get("fingerprint") != other["fingerprint"]:
            raise UserError(
                f"This draft head was tuned for {own.get('model') or 'another model'}, not for "
                f"{other['model'] or 'this one'}: give the model it belongs to, or tune another."
            )

    # -- files -------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        self.carry.save_pretrained(folder)
        path = Path(folder) / TENSORS
        try:
            index = {"format": FORMAT, "version": VERSION, "shape": asdict(self.head.shape)}
            files.write_described(path, self.head.state_dict(), index | {"meta": self.meta})
            if self.choice:
                self.save_choice(folder)
            if self.shortcuts is not None:
                self.shortcuts.save_pretrained(path.with_name(SHORTCUTS))
        except (OSError, SafetensorError) as error:
            raise UserError(f"The head cannot be written to {folder}: {error}.") from error

    def save_choice(self, folder: str | os.PathLike[str]) -> None:
        try:
            files.write_json(Path(folder) / CHOICE, self.choice)
        except OSError as error:
            raise UserError(f"The choice cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Tuned:
        """Read what `deepenough exit tune` wrote; its run folder will do as well."""
        inner = Path(folder) / "model"
        place = inner if (inner / INDEX).is_file() else Path(folder)
        if not (place / INDEX).is_file():
            raise UserError(
                f"{folder} holds no draft head ({INDEX}): give the folder of a finished "
                "deepenough exit tune, or let it finish with --resume."
            )
        carry, maps = LinearDrafter.from_pretrained(place), place / SHORTCUTS
        shortcuts = Shortcuts.from_pretrained(maps) if maps.is_dir() else None
        try:
            tensors, index = files.read_described(place / TENSORS, FORMAT, VERSION)
            head = DraftHead(HeadShape(**index["shape"]))
            head.load_state_dict(tensors)
            choice = place / CHOICE
            chosen = json.loads(choice.read_text(encoding="utf-8")) if choice.is_file() else {}
            head.eval().requires_grad_(False)
            return cls(carry, head, index["meta"], chosen, shortcuts)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{place / INDEX} cannot be used ({error}): tune it again.") from error
