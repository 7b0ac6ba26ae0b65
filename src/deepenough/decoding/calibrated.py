"""`Calibrated`: an exit threshold with a guarantee, kept as `exit.json` beside the shortcuts.

The guarantee is of one way to leave: this model, these maps, exits, policy and fill. All of them
are written down, `early_exit(..., guarantee=...)` restores them, and another model or other maps
are refused. `measure/exit_calibration.py` finds the threshold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepenough.decoding.early_exit import (
    POLICIES,
    ExitPolicy,
    ExitRule,
    KVPropagation,
    ThresholdPolicy,
)
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut import files
from deepenough.shortcut.modeling import Shortcuts

INDEX = "exit.json"
FORMAT, VERSION = "deepenough-exit", 1


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found, and of what."""

    threshold: float | None
    """The fastest that holds; None if none does."""
    policy: str
    policy_options: dict[str, float]
    """Of the policy, beside its threshold."""
    exits: tuple[int, ...]
    fill: KVPropagation
    shortlist: tuple[int, ...] | None
    max_disagreement: float
    confidence: float
    bound: str
    """How the risk was bounded: hoeffding-bentkus or betting."""
    loss: str
    """What is bounded: disagreement, or the name of another loss."""
    text: str
    """Who wrote the texts: full, the full model; or own, the exiting model itself."""
    texts: int
    tokens: int
    thresholds: tuple[float, ...]
    """Those that were tested, the most careful first."""
    risks: tuple[float, ...]
    """Mean losses of these."""
    p_values: tuple[float, ...]
    layers: float | None
    """Layers of a token at the threshold, on average."""
    model: dict[str, Any]
    maps: str
    """A hash of the maps from the exits to the last layer."""
    check: dict[str, float] | None = None
    """The same loss where the exiting model itself wrote the text."""

    def holds(self) -> str:
        """The result in one sentence."""
        sure = f"with confidence {self.confidence:g}"
        if self.threshold is None:
            return (
                f"No threshold holds: none has a {self.loss} of at most "
                f"{self.max_disagreement:g} {sure}, on {self.texts} texts."
            )
        return (
            f"Threshold {self.threshold:g} has a {self.loss} of at most "
            f"{self.max_disagreement:g} {sure}: {self.risks[-1 - self._failed()]:.4f} measured on "
            f"{self.texts} texts."
        )

    def _failed(self) -> int:
        """1 if the last threshold that was tested did not hold."""
        return int(self.thresholds[-1] != self.threshold)

    def early(self, shortcuts: Shortcuts, adapter: Adapter) -> ExitRule:
        """The way to leave that was calibrated."""
        if self.threshold is None:
            raise UserError(
                f"{self.holds()} Use speculate() instead, or calibrate with a greater "
                "max_disagreement or more texts."
            )
        policy: ExitPolicy = POLICIES[self.policy](self.threshold, **self.policy_options)  # type: ignore[call-arg]
        words = None if self.shortlist is None else torch.tensor(self.shortlist)
        early = ExitRule(shortcuts, policy, self.exits, self.fill, words)
        if self.model.get("fingerprint") != adapter.identity()["fingerprint"]:
            raise UserError(
                f"The guarantee was made for {self.model.get('model') or 'another model'}, whose "
                "weights are others: calibrate this model."
            )
        if maps_hash(early) != self.maps:
            raise UserError(
                "The guarantee was made with other shortcuts than these: give those, or calibrate "
                "again."
            )
        return early

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `exit.json` into a folder, as of the shortcuts or the model."""
        path = Path(folder) / INDEX
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
            files.write_json(path, content)
        except OSError as error:
            raise UserError(f"The guarantee cannot be written to {path}: {error}.") from error
        return path

    @classmethod
    def load(cls, place: str | os.PathLike[str]) -> Calibrated:
        """From a folder with an `exit.json`, or from such a file."""
        path = Path(place) / INDEX if Path(place).is_dir() else Path(place)
        if not path.is_file():
            raise UserError(
                f"There is no guarantee at {path}: make one with deepenough exit calibrate."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT or content.pop("version") > VERSION:
                raise ValueError(f"its format is not {FORMAT} {VERSION}")
            for name in ("exits", "shortlist", "thresholds", "risks", "p_values"):
                content[name] = None if content[name] is None else tuple(content[name])
            found = cls(**content)
            if found.policy not in POLICIES:
                raise ValueError(f"there is no policy {found.policy}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}): calibrate again.") from error
        return found


def policy_parts(policy: ExitPolicy) -> tuple[str, dict[str, float]]:
    """Name and options of a policy with a threshold; others have none to calibrate."""
    names = {kind: name for name, kind in POLICIES.items()}
    if not isinstance(policy, ThresholdPolicy) or type(policy) not in names:
        raise UserError(
            f"{type(policy).__name__} has no threshold to calibrate: use the policy gap, top or "
            "entropy."
        )
    options = dataclasses.asdict(policy)
    del options["threshold"]
    return names[type(policy)], options


def maps_hash(early: ExitRule) -> str:
    """Of the maps by which tokens leave."""
    digest = hashlib.sha256()
    for layer in sorted(set(early.layers)):
        matrix, bias = early.shortcuts._map(layer, early.shortcuts.num_layers, early.map_mode)
        for tensor in (matrix, bias):
            if tensor is not None:
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
