"""What an evaluation of shortcuts has counted, and the records that a run keeps of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepenough.runs import Record
from deepenough.shortcut.exit_sweep import LAMBDAS, fixed_exits, layers_saved, sweep
from deepenough.shortcut.reading import Tally
from deepenough.shortcut.scores import PRECISIONS, Scores


@dataclass
class LayerScores:
    """Sums over tokens for one mode and layer."""

    hits: Tensor = field(default_factory=lambda: torch.zeros(len(PRECISIONS), dtype=torch.long))
    surprisal: float = 0.0
    kl: float = 0.0
    positions: int = 0

    def add(self, scores: Scores) -> None:
        self.hits += torch.stack([(scores.rank < k).sum() for k in PRECISIONS]).cpu()
        self.surprisal += float(scores.surprisal.double().sum())
        self.kl += float(scores.kl.double().sum())
        self.positions += len(scores.rank)

    def values(self) -> dict[str, Any]:
        shares = (self.hits / self.positions).tolist()
        return {
            **{f"precision_{k}": share for k, share in zip(PRECISIONS, shares, strict=True)},
            "surprisal": self.surprisal / self.positions,
            "kl": self.kl / self.positions,
            "positions": self.positions,
        }


@dataclass
class Evaluation:
    """All that was measured in a pass; `records` is what a run keeps of it."""

    num_layers: int
    lambdas: Sequence[float] = LAMBDAS
    layers: dict[tuple[str, int], LayerScores] = field(default_factory=dict)
    """By mode and layer."""
    gaps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    """Confidence of every token, by mode and layer, in pieces."""
    agrees: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    """Whether its prediction is the last layer's."""
    position: list[Tensor] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Of every text."""
    r2: dict[str, Tensor] = field(default_factory=dict)
    cka: Tensor | None = None
    tally: Tally = field(default_factory=Tally)
    """Texts read and skipped."""

    @property
    def positions(self) -> int:
        """Number of tokens that were measured."""
        return sum(len(piece) for piece in self.position)

    @property
    def exit_modes(self) -> list[str]:
        """Modes whose confidences are known at every layer."""
        modes = dict.fromkeys(mode for mode, _ in self.gaps)
        return [
            mode
            for mode in modes
            if all((mode, layer) in self.gaps for layer in range(self.num_layers + 1))
        ]

    def add(self, mode: str, layer: int, scores: Scores, exits: bool) -> None:
        """Count the scores of more tokens; `exits`: keep what early exit needs of each of them."""
        place = (mode, layer)
        self.layers.setdefault(place, LayerScores()).add(scores)
        if exits:
            self.gaps.setdefault(place, []).append(scores.gap.cpu())
            self.agrees.setdefault(place, []).append((scores.rank == 0).cpu())

    def records(self) -> list[Record]:
        """One record for each table, mode and layer, and threshold."""
        found = [Record(0, "r2", {"mode": m, "table": _rows(t)}) for m, t in self.r2.items()]
        if self.cka is not None:
            found.append(Record(0, "cka", {"table": _rows(self.cka)}))
        for (mode, layer), scores in sorted(self.layers.items(), key=lambda item: item[0][1]):
            found.append(Record(0, "layer", {"mode": mode, "layer": layer, **scores.values()}))
        for mode in self.exit_modes:
            found += self._exit_records(mode)
        return found

    def _exit_records(self, mode: str) -> Iterator[Record]:
        layers = range(self.num_layers + 1)
        gap_LN = torch.stack([torch.cat(self.gaps[mode, layer]) for layer in layers])
        agrees_LN = torch.stack([torch.cat(self.agrees[mode, layer]) for layer in layers])
        mean_length = sum(self.lengths) / len(self.lengths)
        position_N = torch.cat(self.position)
        points = sweep(gap_LN, agrees_LN, position_N, mean_length, self.lambdas)
        for point in points:
            values = {
                "lambda": point.lambda_,
                "layers_mean": point.layers_mean,
                "saved": point.saved,
                "agreement": point.agreement,
            }
            yield Record(0, "exit", {"mode": mode, **values})
        for row in layers_saved(points, fixed_exits(agrees_LN)):
            values = {
                "agreement": row.agreement,
                "saved": row.saved,
                "lambda": row.lambda_,
                "fixed_layer_saved": row.fixed_layer_saved,
            }
            yield Record(0, "saved", {"mode": mode, **values})


def _rows(table: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in table.tolist()]
