"""When a token may leave: policies over what the layers so far predict.

At a layer where exits are checked, the state is taken to the last layer by its shortcut, normed,
and projected on a shortlist (or on all words); a policy looks at the probabilities that result.
`lambda` is a confidence in [0, 1]: the higher, the later a token leaves.

Shapes: B rows, S words.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepenough.errors import UserError


@dataclass(frozen=True)
class Look:
    """What a policy sees of rows at one layer."""

    layer: int
    probabilities_BS: Tensor
    place_B: Tensor
    """How many tokens each row has generated."""
    streak_B: Tensor
    """At how many checked layers in a row, this one included, the best word was the same."""


class ExitPolicy(ABC):
    watches_streaks: ClassVar[bool] = True
    """Whether `Look.streak_B` matters; otherwise it is not counted, and all ones."""

    @abstractmethod
    def leaves(self, look: Look) -> Tensor:
        """Which rows leave, booleans `[B]`."""


@dataclass(frozen=True)
class ThresholdPolicy(ExitPolicy):
    """A token leaves where its confidence, which no threshold enters, exceeds `threshold`.

    So one look tells what every threshold would do.
    """

    watches_streaks = False

    threshold: float

    def __post_init__(self) -> None:
        check_threshold(self.threshold)

    @abstractmethod
    def confidence(self, look: Look) -> Tensor:
        """Of every row, `[B]`."""

    def leaves(self, look: Look) -> Tensor:
        return self.confidence(look) > self.threshold


@dataclass(frozen=True)
class ConfidenceGap(ThresholdPolicy):
    """The gap between the two best exceeds `0.9 lambda + 0.1 exp(-4 t / N)` (CALM, 2207.07061)."""

    mean_length: float = 128.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mean_length > 0:
            raise UserError(f"mean_length must be above 0: got {self.mean_length}.")

    def confidence(self, look: Look) -> Tensor:
        best = look.probabilities_BS.topk(2, dim=-1).values
        decay = torch.exp(-4.0 * look.place_B / self.mean_length)
        return (best[:, 0] - best[:, 1] - 0.1 * decay) / 0.9


@dataclass(frozen=True)
class TopProbability(ThresholdPolicy):
    """The best word is more probable than `lambda`."""

    def confidence(self, look: Look) -> Tensor:
        return look.probabilities_BS.amax(-1)


@dataclass(frozen=True)
class LowEntropy(ThresholdPolicy):
    """The entropy is below `1 - lambda` of what it could be."""

    def confidence(self, look: Look) -> Tensor:
        entropy = torch.special.entr(look.probabilities_BS).sum(-1)
        return 1 - entropy / math.log(look.probabilities_BS.shape[-1])


@dataclass(frozen=True)
class Patience(ExitPolicy):
    """`layers` checked layers in a row agree on the best word (PABEE, 2006.04152)."""

    layers: int = 2

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UserError(f"Patience is at least 1 layer: got {self.layers}.")

    def leaves(self, look: Look) -> Tensor:
        return look.streak_B >= self.layers


@dataclass(frozen=True)
class FixedLayer(ExitPolicy):
    """Every token leaves at the first checked layer from `layer` on."""

    watches_streaks = False

    layer: int

    def leaves(self, look: Look) -> Tensor:
        return torch.full_like(look.streak_B, look.layer >= self.layer, dtype=torch.bool)


def check_threshold(threshold: float) -> None:
    if not 0.0 <= threshold <= 1.0:
        raise UserError(f"A threshold must be between 0 and 1: got {threshold}.")


POLICIES: dict[str, type[ExitPolicy]] = {
    "gap": ConfidenceGap,
    "top": TopProbability,
    "entropy": LowEntropy,
    "patience": Patience,
    "layer": FixedLayer,
}


#: Where a policy stands without a threshold of its own.
_USUAL = {"gap": 0.9, "top": 0.9, "entropy": 0.9, "patience": 2}


def make_policy(name: str, value: float | None = None) -> ExitPolicy:
    """A policy by name; `value` is its threshold, its number of layers, or its layer."""
    if name not in POLICIES:
        raise UserError(f"There is no policy {name!r}: choose one of {', '.join(POLICIES)}.")
    value = _USUAL.get(name) if value is None else float(value)
    if value is None:
        raise UserError(f"The policy {name} needs to know which: give it as the threshold.")
    made: ExitPolicy
    if name in ("patience", "layer"):
        if value != int(value):
            raise UserError(f"The policy {name} takes a whole number of layers: got {value}.")
        made = Patience(int(value)) if name == "patience" else FixedLayer(int(value))
    else:
        made = POLICIES[name](value)  # type: ignore[call-arg]
    return made
