"""What can be chosen about pondering: the same for every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepenough.errors import UserError
from deepenough.ponder.distribution import check_target

HaltingHeadKind = Literal["previous", "answer", "second_cls"]
Objective = Literal["ponder", "weighted", "last"]
Pooling = Literal["cls", "mean"]
Exit = Literal["quantile", "sampled", "confidence", "patience", "fixed"]

CHOICES: dict[str, tuple[str, ...]] = {
    "halting_head": ("previous", "answer", "second_cls"),
    "objective": ("ponder", "weighted", "last"),
    "pooling": ("cls", "mean"),
    "exit": ("quantile", "sampled", "confidence", "patience", "fixed"),
}


@dataclass
class PonderSettings:
    """How a classifier ponders."""

    num_passes: int | None = None
    """Most passes over the layers; as many as the encoder has when left out. A shared layer may be
    applied more often than it was in pretraining."""

    objective: Objective = "ponder"
    """What is trained: `ponder` learns when to halt; `weighted` (PABEE) an answer at every pass,
    later ones weighing more; `last` the answer of the last pass alone."""

    halting_head: HaltingHeadKind = "previous"
    """What the decision to halt is read from: the states of this and the `previous` pass (PALBERT),
    these and by how much the best `answer` leads, or a `second_cls` token that the model puts after
    the first."""

    pooling: Pooling = "cls"
    """What answers are read from: the first token (`cls`) or the `mean` of all."""

    halting_target: float = 0.2
    """Halting probability of the geometric prior: about 1 / (passes wanted on average)."""

    kl_weight: float = 0.5
    """Weight (beta) of the divergence from the prior."""

    early_gradient: float = 1.0
    """Share of the gradient of the heads before the last pass that reaches the encoder. Below 1 the
    last answer suffers less from the early ones, whose heads learn at full rate all the same."""

    exit: Exit = "quantile"
    """When to stop in evaluation: once the probability of having halted reaches a threshold
    (`quantile`), by a draw from the halting distribution (`sampled`), once the probability of the
    answer reaches a threshold (`confidence`), when `patience` answers in a row agree (PABEE), or
    after a `fixed` number of passes."""

    exit_threshold: float = 0.5
    """Threshold of the `quantile` and `confidence` exits."""

    exit_patience: int = 2
    """How often in a row an answer must be repeated for the `patience` exit."""

    exit_pass: int | None = None
    """Passes of the `fixed` exit; all when left out."""

    exit_seed: int | None = None
    """Seed of the `sampled` exit; a draw is then a function of the seed and the example's number.
    Without one, torch's generator is used."""


def check_settings(settings: PonderSettings, depth: int, shared: bool) -> int:
    """Refuse what cannot be; returns the number of passes over an encoder of `depth` layers."""
    for name, choices in CHOICES.items():
        if (value := getattr(settings, name)) not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}: got {value!r}.")
    num_passes = depth if settings.num_passes is None else settings.num_passes
    if num_passes < 1:
        raise UserError(f"num_passes must be at least 1: got {num_passes}.")
    if num_passes > depth and not shared:
        raise UserError(
            f"num_passes is {num_passes}, but the encoder has {depth} layers, which are not "
            f"shared: give at most {depth}."
        )
    check_target(settings.halting_target)
    if settings.kl_weight < 0:
        raise UserError(f"kl_weight must not be negative: got {settings.kl_weight}.")
    if not 0 <= settings.early_gradient <= 1:
        raise UserError(f"early_gradient must be from 0 to 1: got {settings.early_gradient}.")
    check_threshold(settings.exit_threshold)
    if settings.exit_patience < 1:
        raise UserError(f"exit_patience must be at least 1: got {settings.exit_patience}.")
    if settings.exit_pass is not None and not 1 <= settings.exit_pass <= num_passes:
        raise UserError(
            f"exit_pass must lie between 1 and num_passes, {num_passes}: got {settings.exit_pass}."
        )
    if settings.objective != "ponder" and settings.exit in ("quantile", "sampled"):
        raise UserError(
            f"A model trained with objective {settings.objective!r} has no halting probabilities "
            f"for the exit {settings.exit!r}: choose confidence, patience or fixed."
        )
    return num_passes


def check_threshold(threshold: float) -> None:
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"The exit threshold must be above 0 and at most 1: got {threshold}.")
