"""Does a comparison measured twice say the same, and what does measuring itself cost?

A small language model is trained for a moment (its quality does not matter here), compared at three
lengths of memory, and compared again with another order of turns. Reported: for how many points the
intervals of the two comparisons meet, for times and for relative times, and the share of the
measured time that went into bookkeeping.

    python benchmarks/compare_repeat.py [--save]        two minutes, on a quiet machine
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import save_result

from deepenough.compare.config import CompareConfig
from deepenough.compare.frontier import compare
from deepenough.config import resolve
from deepenough.measurement import Interval
from deepenough.par.config import ParTrainConfig
from deepenough.par.training import train

MODEL = {
    "data.vocab_size": 2000,
    "data.batch_size": 16,
    "data.length": 64,
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        train(resolve(ParTrainConfig, overrides={"run.folder": run, **MODEL}))
        first, second = (measured(run, Path(folder) / f"out{seed}", seed) for seed in (0, 1))
    pairs = list(zip(first["points"], second["points"], strict=True))
    assert all(a["quality"] == b["quality"] for a, b in pairs), "quality is no matter of chance"
    meet = {
        cost: sum(interval(a, cost).meets(interval(b, cost)) for a, b in pairs)
        for cost in ("milliseconds", "relative_time")
    }
    bookkeeping = max(first["bookkeeping"], second["bookkeeping"])
    result = {
        "points": [
            {"name": a["name"], **{cost: [interval(a, cost), interval(b, cost)] for cost in meet}}
            for a, b in pairs
        ],
        "num_points": len(pairs),
        "intervals_that_meet": meet,
        "bookkeeping": bookkeeping,
        "bar": {"bookkeeping": 0.02},
    }
    save_result("compare_repeat", result, arguments.save)
    return 0 if bookkeeping < 0.02 and meet["relative_time"] == len(pairs) else 1


def measured(run: str, out: Path, seed: int) -> dict[str, Any]:
    values = {"runs": [run], "out": str(out), "seed": seed, "rounds": ROUNDS}
    values |= {"grid.mem_len": MEMORIES, "data.limit": SEGMENTS}
    return compare(resolve(CompareConfig, overrides=values))


def interval(point: dict[str, Any], cost: str) -> Interval:
    return Interval(point[cost], point[f"{cost}_low"], point[f"{cost}_high"])


if __name__ == "__main__":
    sys.exit(main())
