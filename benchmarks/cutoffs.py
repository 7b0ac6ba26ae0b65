"""Optimal cutoffs: how long the exact solver takes.

    python benchmarks/cutoffs.py [--save]

Two things, all measured in this run:

- the solver on a 12,000-word vocabulary (WikiText-2 with its tokenizer where $DEEPENOUGH_DATA has
  them, else a Zipf law) and on a million words of a Zipf law, with 3 and 10 clusters;
- the plain O(K N^2) loop beside it on small vocabularies, results compared, to show how each grows.

`--save` writes benchmarks/results/cutoffs.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from record import save_result

from deepenough.nn.cutoffs import Partition, optimal_cutoffs, optimal_cutoffs_ref


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    save = parser.parse_args().save
    name, words = small_vocabulary()
    results: dict[str, Any] = {
        "solver": solver_times({name: words, "Zipf": zipf(1_000_000)}),
        "growth": growth(),
    }
    save_result("cutoffs", results, save)


def solver_times(vocabularies: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    print("Exact solver, fastest of 5")
    rows = []
    for name, masses in vocabularies.items():
        for clusters in (3, 10):
            seconds, found = fastest(lambda m=masses, k=clusters: optimal_cutoffs(m, k), 5)
            print(
                f"  {name:10} {len(masses):>9,} words, {clusters:>2} clusters: {seconds:8.4f} s"
                f"  cost {found.cost:,.2f}  cutoffs {found.cutoffs}"
            )
            rows.append(
                {"vocabulary": name, "words": len(masses), "clusters": clusters}
                | {"seconds": seconds, **vars(found)}
            )
    return rows


def growth() -> list[dict[str, Any]]:
    print("Growth with the vocabulary (Zipf, 3 clusters): this solver against the plain loop")
    rows = []
    for size in (500, 1000, 2000):
        masses = zipf(size)
        fast, found = fastest(lambda m=masses: optimal_cutoffs(m, 3), 5)
        plain, expected = fastest(lambda m=masses: optimal_cutoffs_ref(m, 3), 1)
        if found != expected:
            raise AssertionError(f"the solvers disagree: {found} and {expected}")
        print(f"  {size:>5} words: {fast:.5f} s against {plain:.3f} s, {plain / fast:,.0f} times")
        rows.append({"words": size, "seconds": fast, "plain_loop_seconds": plain})
    return rows


def small_vocabulary() -> tuple[str, np.ndarray]:
    """Counts, descending: of WikiText-2 in 12,000 pieces, lower-cased, where it is at hand."""
    folder = Path(os.environ.get("DEEPENOUGH_DATA", ""))
    text, model = folder / "wikitext-2" / "train.txt", folder / "par" / "wiki2_12k.model"
    if not (text.is_file() and model.is_file()):
        return "Zipf", zipf(12_000)
    import sentencepiece

    encoder = sentencepiece.SentencePieceProcessor(model_file=str(model))
    counts = np.zeros(encoder.vocab_size(), dtype=np.int64)
    with text.open(encoding="utf-8") as lines:
        for ids in encoder.encode([line.strip().lower() for line in lines]):
            np.add.at(counts, ids, 1)
    return "WikiText-2", np.sort(counts)[::-1]


def zipf(num_words: int) -> np.ndarray:
    """Whole counts that fall as 1/rank, from 10^9."""
    return (1e9 / np.arange(1, num_words + 1)).astype(np.int64)


def fastest(solve: Callable[[], Partition], turns: int) -> tuple[float, Partition]:
    best = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        found = solve()
        best = min(best, time.perf_counter() - start)
    return best, found


if __name__ == "__main__":
    main()
