"""The exact solver finds the best cutoffs of 12,000 words in milliseconds, of a million in seconds.

The vocabulary of 12,000 words is that of WikiText-2 in $DEEPENOUGH_DATA; the million follows a Zipf
law. The plain O(K N^2) loop stands beside the solver on small
vocabularies; both must find the same cutoffs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import interleaved, require
from deepenough.nn.cutoffs import optimal_cutoffs, optimal_cutoffs_ref

QUICK = True
SEEDS: list[int] = []
CLUSTERS = (3, 10)


def measure(rounds: int = 5) -> dict[str, Any]:
    """Time the solver, and the plain loop beside it; return seconds, costs and cutoffs."""
    words = wikitext_counts()
    solver: dict[str, Any] = {}
    for size, masses in (("12000", words), ("1000000", zipf(1_000_000))):
        solve = {str(k): lambda m=masses, k=k: optimal_cutoffs(m, k) for k in CLUSTERS}
        timings = interleaved(solve, rounds)
        solver[size] = {
            clusters: {
                "seconds": timings.best(clusters),
                "cost": found[0].cost,
                "cutoffs": found[0].cutoffs,
            }
            for clusters, found in timings.results.items()
        }
    return {
        "solver": solver,
        "growth": {str(size): growth(size) for size in (500, 1000, 2000)},
        "settings": {"vocabulary": "WikiText-2", "rounds": rounds},
    }


def growth(size: int) -> dict[str, Any]:
    """Return the seconds of solver and plain loop on a Zipf law of so many words, and the ratio."""
    masses = zipf(size)
    functions = {
        "solver": lambda: optimal_cutoffs(masses, 3),
        "plain_loop": lambda: optimal_cutoffs_ref(masses, 3),
    }
    timings = interleaved(functions, rounds=2)
    found, expected = (timings.results[name][0] for name in functions)
    if found != expected:
        raise AssertionError(f"The solvers disagree: {found} and {expected}")
    seconds = {f"{name}_seconds": timings.best(name) for name in functions}
    return {**seconds, "times_faster": timings.ratio("plain_loop", "solver")}


def wikitext_counts() -> np.ndarray:
    """Return descending counts of WikiText-2 in 12,000 lower-case pieces."""
    folder = Path(os.environ.get("DEEPENOUGH_DATA", "data"))
    remedy = "set DEEPENOUGH_DATA to a folder with wikitext-2/ and par/."
    text = require(folder / "wikitext-2" / "train.txt", remedy)
    model = require(folder / "par" / "wiki2_12k.model", remedy)
    import sentencepiece

    encoder = sentencepiece.SentencePieceProcessor(model_file=str(model))
    counts = np.zeros(encoder.vocab_size(), dtype=np.int64)
    with text.open(encoding="utf-8") as lines:
        for ids in encoder.encode([line.strip().lower() for line in lines]):
            np.add.at(counts, ids, 1)
    return np.sort(counts)[::-1]


def zipf(num_words: int) -> np.ndarray:
    """Return whole counts that fall as 1/rank, from 10^9."""
    return (1e9 / np.arange(1, num_words + 1)).astype(np.int64)
