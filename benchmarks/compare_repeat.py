"""A comparison measured twice says the same, and its bookkeeping costs next to nothing.

A small language model is trained for a moment (its quality does not matter here), compared at four
lengths of memory, and compared again with another order of turns. Counted are the points at which
the intervals of the two comparisons meet, and the share of the time that bookkeeping took.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from deepenough.compare.frontier import compare
from deepenough.config import resolve
from deepenough.par.config import ParTrainConfig
from deepenough.par.training import train

QUICK = True
SEEDS = [0, 1]
MODEL = {
    "dataset.vocab_size": 2000,
    "dataset.batch_size": 16,
    "dataset.length": 64,
    "model.pattern": "adadad",
    "model.d_model": 128,
    "model.num_heads": 4,
    "model.d_ff": 512,
    "model.mem_len": 256,
    "train.steps": 20,
    "train.warmup": 5,
}
MEMORIES = [256, 128, 64, 0]
ROUNDS, SEGMENTS = 9, 16
COSTS = ("milliseconds", "relative_time")


def measure() -> dict[str, Any]:
    """Compare twice; return how many intervals meet, the points and the share of bookkeeping."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        train(resolve(ParTrainConfig, overrides={"out": run, **MODEL}))
        first, second = (compared(run, Path(folder) / f"out{seed}", seed) for seed in SEEDS)
    pairs = list(zip(first["points"], second["points"], strict=True))
    assert all(a["quality"] == b["quality"] for a, b in pairs), "quality is no matter of chance"
    points = {
        a["name"].replace(" ", "_"): {cost: [figure(a, cost), figure(b, cost)] for cost in COSTS}
        for a, b in pairs
    }
    meet = {cost: sum(intervals_meet(a, b, cost) for a, b in pairs) for cost in COSTS}
    bookkeeping = max(first["bookkeeping"], second["bookkeeping"])
    return {
        "num_points": len(pairs),
        "intervals_that_meet": {f"of_{cost}": Figure(n, "points") for cost, n in meet.items()},
        "bookkeeping_share": Figure(bookkeeping, "share", 0.0, 0.02),
        "points": points,
        "settings": {"rounds": ROUNDS, "segments": SEGMENTS},
    }


def compared(run: str, out: Path, seed: int) -> dict[str, Any]:
    """Return one comparison of the run over all lengths of memory."""
    grid = {"grid.mem_len": MEMORIES}
    return compare([run], out=str(out), seed=seed, rounds=ROUNDS, limit=SEGMENTS, **grid)


def intervals_meet(a: dict[str, Any], b: dict[str, Any], cost: str) -> bool:
    """Return whether the intervals of a cost at two points have a value in common."""
    low, high = f"{cost}_low", f"{cost}_high"
    return bool(a[low] <= b[high] and b[low] <= a[high])


def figure(point: dict[str, Any], cost: str) -> Figure:
    """Return a point's cost as a figure."""
    unit = "ms" if cost == "milliseconds" else "x"
    return Figure(point[cost], unit, point[f"{cost}_low"], point[f"{cost}_high"])
