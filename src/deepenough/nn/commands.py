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
    from deepenough.nn.cutoffs import Numbers, Partition


@dataclass
class CutoffsConfig:
    """Cutoffs of an adaptive softmax."""

    clusters: int = bounded(ge=1)
    """Number of clusters: the head and its tails."""

    counts: str | None = None
    """File of counts or probabilities: numbers between spaces, or lines token<TAB>count."""

    run: str | None = None
    """Folder of a language model's run, whose training text is counted instead."""

    keep_order: bool = False
    """Cut the tokens in the order given, as a model with these very ids will, without sorting."""

    json: bool = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Refuse no input, or two."""
        if (self.counts is None) == (self.run is None):
            raise UserError("Give either --counts FILE or --run RUN.")


def find_cutoffs(config: CutoffsConfig) -> None:
    """Read the counts, solve for the cutoffs and print them."""
    import numpy as np

    from deepenough.nn.cutoffs import count_tokens, optimal_cutoffs, partition_cost, read_counts

    given = count_tokens(config.run) if config.run is not None else read_counts(config.counts or "")
    masses = given if config.keep_order else np.sort(given)[::-1]
    start = time.perf_counter()
    found = optimal_cutoffs(masses, config.clusters)
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
    else:
        _show(masses, found, seconds)


def _show(masses: Numbers, found: Partition, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"Cutoffs {found.cutoffs} for {len(masses):,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("cluster")
    for column in ("ids", "size", "share of text", "size x share"):
        table.add_column(column, justify="right")
    bounds = [0, *found.cutoffs, len(masses)]
    total = float(masses.sum(dtype="float64"))
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        share = float(masses[start:stop].sum(dtype="float64")) / total
        size = stop - start
        table.add_row(
            f"tail {number}" if number else "head",
            f"{start:,} to {stop - 1:,}",
            f"{size:,}",
            f"{share:.2%}",
            f"{size * share:,.1f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"A token costs {found.cost:,.1f} outputs on average instead of {len(masses):,} "
        f"({len(masses) / found.cost:,.1f} times fewer). Solved in {seconds:.3f} s.",
        highlight=False,
        soft_wrap=True,
    )


CUTOFFS = Command(
    name="cutoffs",
    help="find the best adaptive-softmax cutoffs for token counts",
    config=CutoffsConfig,
    run=find_cutoffs,
    description="Find the cutoffs of an adaptive softmax that cost least: tokens in the order of "
    "their\nfrequency are cut into clusters, and a cluster costs its number of tokens times its "
    "share\nof the text. The result is exact, and is what torch.nn.AdaptiveLogSoftmaxWithLoss "
    "takes\nas cutoffs.",
    example="deepenough cutoffs --counts counts.txt --clusters 3",
)
