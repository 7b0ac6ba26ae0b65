"""What a run has recorded of its Lazy Transformer: one pair of sentences, many, and sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepenough.report.source import Run

TOKENS, REST, STEPS, EPSILON = "lazy_tokens", "lazy_rest", "steps", "epsilon"
"""Kinds of the records that are read here."""


@dataclass(frozen=True)
class Side:
    """The tokens of one side, T of them, over N steps."""

    name: str
    tokens: list[str]
    similarity: np.ndarray
    """[T, N], squared cosine of a token's state before and after each step."""
    sentence: np.ndarray
    """[N], the same of the whole sentence."""
    gates: np.ndarray | None
    """[T, N], of lazy models."""
    depth: list[int] | None
    """Steps of each token with equilibrium exit, where it was looked at."""


@dataclass(frozen=True)
class Look:
    source: str
    target: str
    sides: Sequence[Side]
    epsilon: float | None


def last_look(run: Run) -> Look | None:
    """The pair that was looked at last."""
    values = _last(run, TOKENS)
    if values is None:
        return None
    sides = [_side(name, values[name]) for name in ("encoder", "decoder")]
    return Look(values["source"], values["target"], sides, values.get("epsilon"))


def _side(name: str, values: dict[str, Any]) -> Side:
    gates = values.get("gates")
    return Side(
        name,
        values["tokens"],
        np.array(values["similarity"]),
        np.array(values["sentence"]),
        None if gates is None else np.array(gates),
        values.get("depth"),
    )


def last_rest(run: Run) -> dict[str, Any] | None:
    """What many sentences showed last."""
    return _last(run, REST)


def step_grid(run: Run) -> dict[tuple[int, int], float]:
    """BLEU by encoder and decoder steps, the latest of each."""
    return {
        (record.values["encoder_steps"], record.values["decoder_steps"]): record.values["bleu"]
        for record in run.records
        if record.kind == STEPS
    }


def epsilon_points(run: Run) -> list[dict[str, Any]]:
    """The measurements of the sweep over epsilons, the latest of each, in order."""
    found = {
        (record.values["epsilon"], record.values["patience"]): record.values
        for record in run.records
        if record.kind == EPSILON
    }
    return [found[key] for key in sorted(found)]


def trained_steps(run: Run) -> tuple[int, int] | None:
    model = run.config.get("model", {})
    try:
        return int(model["encoder_steps"]), int(model["decoder_steps"])
    except (KeyError, TypeError, ValueError):
        return None


def _last(run: Run, kind: str) -> dict[str, Any] | None:
    found = [record.values for record in run.records if record.kind == kind]
    return found[-1] if found else None
