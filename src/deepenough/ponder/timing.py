"""Seconds that stopping really saves: the same examples, the same batches, several ways to stop.

The ways take turns, and the fastest round of each counts: a busy machine then slows all alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from deepenough.data.encoded_examples import EncodedExamples
from deepenough.data.length_batches import by_length
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.policies import ExitPolicy
from deepenough.runs import Record

TIME = "ponder_time"
"""Kind of the records that this module makes."""


@torch.no_grad()
def time_exits(
    model: PonderClassifier,
    examples: EncodedExamples,
    policies: Mapping[str, ExitPolicy],
    *,
    batch_size: int = 32,
    rounds: int = 3,
) -> dict[str, dict[str, float]]:
    """Seconds, mean passes and accuracy of every policy over all examples."""
    model.eval()
    batches = [
        examples.batch(rows, model.device) for rows in by_length(examples.lengths, batch_size)
    ]
    labels = [batch.pop("labels") for batch in batches]
    measured: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, policy in policies.items():
            started = time.perf_counter()
            outputs = [model(**batch, policy=policy) for batch in batches]
            seconds = time.perf_counter() - started
            passes = torch.cat([output.passes for output in outputs]).double().mean()
            right = [o.logits.argmax(-1) == own for o, own in zip(outputs, labels, strict=True)]
            best = measured.get(name, {}).get("seconds", seconds)
            measured[name] = {
                "seconds": min(best, seconds),
                "passes": float(passes),
                "accuracy": float(torch.cat(right).double().mean()),
            }
    return measured


def time_records(
    measured: Mapping[str, Mapping[str, float]], *, step: int, about: dict[str, Any]
) -> list[Record]:
    """One record a way of stopping; `about` says in each what was measured."""
    return [
        Record(step, TIME, about | {"policy": name} | dict(values))
        for name, values in measured.items()
    ]
