"""`deepenough cutoffs`: optimal cutoffs of an adaptive softmax, from token counts."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepenough.config import Command, bounded
from deepenough.errors import UserError

if TYPE_CHECKING:
    from deepenough.nn.cutoffs import Numbers


@dataclass
class CutoffsConfig:
    """Cutoffs of an adaptive softmax."""

    run: str | None = None
    """Folder of a language model's run, whose training text is counted by its own ids."""

    counts: str | None = None
    """File of counts or probabilities instead: numbers between spaces, or lines token<TAB>count."""

    clusters: int = bounded(3, ge=1)
    """Number of clusters: the head and its tails."""

    keep_order: bool = False
    """Cut the tokens in the order given, as a model with these very ids will, without sorting."""

    json: bool = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Refuse no input, or two."""
        if (self.counts is None) == (self.run is None):
            raise UserError("Give either the folder of a run or --counts FILE.")


def find_cutoffs(config: CutoffsConfig) -> None:
    """Read the counts, solve for the cutoffs and print them."""
    import numpy as np

    from deepenough.nn import cutoffs
    from deepenough.nn.cutoffs import partition_cost, read_counts

    given = _count_tokens(config.run) if config.run else read_counts(config.counts or "")
    masses = given if config.keep_order or config.run else np.sort(given)[::-1]
    by_share = config.run is not None and not config.keep_order
    solve = cutoffs.cutoffs_by_share if by_share else cutoffs.optimal_cutoffs
    start = time.perf_counter()
    found = solve(masses, config.clusters)
    seconds = time.perf_counter() - start
    if (masses != given).any():
        print(
            "deepenough: note: the counts were not in descending order and have been sorted. "
            "Cutoffs are ranks: they fit a model whose token ids go from frequent to rare. With "
            f"the ids as given these cutoffs cost {partition_cost(given, found.cutoffs):,.1f} "
            f"instead of {found.cost:,.1f}; --keep_order finds the best for them.",
            file=sys.stderr,
        )
    if config.json:
        result = {"cutoffs": found.cutoffs, "cost": found.cost, "seconds": seconds}
        print(json.dumps(result | {"clusters": config.clusters, "vocab_size": len(masses)}))
        return
    print(f"Cutoffs {found.cutoffs} for {len(masses):,} tokens")
    print(f"{'cluster':<10}{'ids':>24}{'size':>12}{'share of text':>16}{'size x share':>16}")
    bounds = [0, *found.cutoffs, len(masses)]
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
        name = f"tail {number}" if number else "head"
        ids, size = f"{first:,} to {stop - 1:,}", stop - first
        share = masses[first:stop].sum(dtype="float64") / masses.sum(dtype="float64")
        print(f"{name:<10}{ids:>24}{size:>12,}{share:>16.2%}{size * share:>16,.1f}")
    print(
        f"A token costs {found.cost:,.1f} outputs on average instead of {len(masses):,} "
        f"({len(masses) / found.cost:,.1f} times fewer). Solved in {seconds:.3f} s."
    )


def _count_tokens(run: str) -> Numbers:
    """Return how often each token id occurs in the text that a language model was trained on."""
    from deepenough.config import resolve
    from deepenough.data.config import DatasetConfig
    from deepenough.data.tokens import prepare
    from deepenough.runs import read_config, read_section

    dataset = resolve(DatasetConfig, overrides=read_section(run, "dataset"))
    return prepare(str(read_config(run)["data"]), dataset).tokens["train"].vocab_counts()


CUTOFFS = Command(
    name="cutoffs",
    help="find the best adaptive-softmax cutoffs for token counts",
    config=CutoffsConfig,
    run=find_cutoffs,
    description="Find the cutoffs of an adaptive softmax that cost least: tokens in the order of "
    "their\nfrequency are cut into clusters, and a cluster costs its number of tokens times its "
    "share\nof the text. The result is exact, and is what torch.nn.AdaptiveLogSoftmaxWithLoss "
    "takes\nas cutoffs.",
    example="deepenough cutoffs runs/mine --clusters 3",
    positional=("run",),
)
