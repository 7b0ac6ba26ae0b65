"""Run folders as a search or a training would leave them, made without a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deepenough.runs import Metrics, Record, RunFolder

MakeRun = Callable[..., Path]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def write_run(
    path: Path,
    *,
    pattern: str = "aadad-",
    num_steps: int = 2000,
    every: int = 10,
    search: bool = True,
    derived: bool = True,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> Path:
    """A run whose loss falls as losses do and whose search decides, one block before another."""
    folder = RunFolder.create(path)
    folder.config.write_text(yaml.safe_dump(config or {"model": {"num_blocks": len(pattern)}}))
    rng = np.random.default_rng(seed)
    metrics = Metrics(folder.metrics)
    chosen = np.array(["ad-".index(letter) for letter in pattern])
    drift = rng.uniform(1.0, 5.0, len(pattern))
    noise = rng.normal(0, 0.3, (len(pattern), 3))
    pi = softmax(noise)
    for step in range(every, num_steps + 1, every):
        done = step / num_steps
        loss = 3.6 + 5.2 * math.exp(-9 * done) + rng.normal(0, 0.08) - 0.3 * done
        values: dict[str, Any] = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "lr": 2e-3 * min(step / 200, 0.5 * (1 + math.cos(math.pi * done))),
            "grad_norm": float(rng.uniform(0.3, 0.9)),
            "tokens_per_second": 9000.0,
        }
        if search:
            logits = noise.copy()
            logits[np.arange(len(pattern)), chosen] += drift * done
            pi = softmax(logits)
            entropy = -(pi * np.log(pi)).sum(axis=1).mean() / math.log(3)
            values |= {"tau": 0.1**done, "entropy": float(entropy), "pi": pi.tolist()}
        metrics.append(Record(step, "train", values))
        if step % (num_steps // 10) == 0:
            valid = loss + 0.12
            metrics.append(
                Record(
                    step, "valid", {"loss": valid, "perplexity": math.exp(valid), "tokens": 250000}
                )
            )
    metrics.append(Record(num_steps, "test", {"loss": 3.37, "perplexity": math.exp(3.37)}))
    if search and derived:
        values = {
            "pattern": pattern,
            "pi": pi.tolist(),
            "relative_cost": 0.65,
            "parameters": 4_210_688,
        }
        metrics.append(Record(num_steps, "derive", values))
    return folder.path


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("name", ...)` writes a fake run folder and returns its path."""
    return lambda name="first", **options: write_run(tmp_path / name, **options)
