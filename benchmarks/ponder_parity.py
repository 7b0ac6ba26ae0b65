"""PonderNet's halting carries parity beyond the difficulties it was trained on.

The same recurrent network is trained three times on vectors with 1 to 10 of 16 entries that are not
zero: with PonderNet's halting, with Adaptive Computation Time, and at a fixed depth. All are then
measured by difficulty, on 1 to 16 entries. An interrupted training goes on where it stopped when
the command is given again; what is finished is left alone.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from deepenough.config import resolve
from deepenough.figure import read_run
from deepenough.ponder.figures import ParityBand, parity_bands
from deepenough.ponder.parity import ParityTrainConfig, train_parity
from deepenough.runs import read_records

QUICK = True
SEEDS = [0]
MECHANISMS = ("ponder", "act", "fixed")


def measure(runs: str = "runs/ponder-parity") -> dict[str, Any]:
    """Train all mechanisms and return accuracy and passes by difficulty."""
    return {
        f"{mechanism}_{seed}": figures(run_one(Path(runs), mechanism, seed))
        for seed in SEEDS
        for mechanism in MECHANISMS
    }


def run_one(runs: Path, mechanism: str, seed: int) -> Path:
    """Train one mechanism and return its run folder."""
    folder = runs / f"{mechanism}-{seed}"
    given: dict[str, Any] = {"model.mechanism": mechanism, "train.seed": seed}
    given |= {"out": str(folder), "resume": folder.exists()}
    train_parity(resolve(ParityTrainConfig, overrides=given))
    return folder


def figures(folder: Path) -> dict[str, Any]:
    """Return accuracy in and beyond the difficulties of training, passes, and minutes taken."""
    bands = parity_bands(read_run(folder))
    records, _ = read_records(folder / "metrics.jsonl")
    rates = [r.values["tokens_per_second"] for r in records if "tokens_per_second" in r.values]
    settings = resolve(ParityTrainConfig, folder / "config.yaml")
    inputs = settings.train.steps * settings.train.accumulate * settings.dataset.batch_size
    return {
        "accuracy": mean_accuracy([band for band in bands if not band.beyond]),
        "accuracy_beyond": mean_accuracy([band for band in bands if band.beyond]),
        "passes_by_difficulty": {f"{b.lowest:g}_{b.highest:g}": round(b.passes, 2) for b in bands},
        "accuracy_by_difficulty": {
            f"{b.lowest:g}_{b.highest:g}": round(b.accuracy, 4) for b in bands
        },
        "minutes": inputs / statistics.mean(rates) / 60,
    }


def mean_accuracy(bands: list[ParityBand]) -> float:
    """Return the mean accuracy of bands of difficulty."""
    return statistics.mean(band.accuracy for band in bands)
