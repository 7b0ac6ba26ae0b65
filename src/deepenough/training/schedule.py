"""Learning-rate and temperature schedules as plain functions of the step."""

from __future__ import annotations

import math

from deepenough.training.config import TrainingConfig


def lr_factor(settings: TrainingConfig, step: int) -> float:
    """Share of the highest learning rate at `step` (counted from 0)."""
    warmup, steps = settings.warmup, settings.steps
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    match settings.schedule:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return 1.0 - progress
        case "inverse_sqrt":
            return math.sqrt(max(1, warmup) / (step + 1))
        case _:
            return 1.0


def tau_at(kind: str, start: float, end: float, progress: float) -> float:
    """Temperature after a share `progress` of the search; exactly `end` at 1."""
    if kind == "constant":
        return start
    if progress >= 1.0:
        return end
    if kind == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
