"""`deepenough cutoffs`: where to cut a vocabulary for an adaptive softmax."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from deepenough.cli.parse import parse
from deepenough.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from deepenough.nn.cutoff_choice import Choice

DESCRIPTION = """
Find the cutoffs of an adaptive softmax that cost least: words in the order of their frequency are
cut into clusters, and a cluster costs its number of words times its share of the tokens. The
result is exact, and is what torch.nn.AdaptiveLogSoftmaxWithLoss takes as cutoffs. With --measure
the cost is the time measured on this machine, and the number of clusters is chosen too; time is
all it looks at, and a smaller head is not only faster but also leaves more words to narrow tails.
Dashes may be written for the underscores in names.
"""
EXAMPLE = "deepenough cutoffs --counts counts.txt --clusters 3"


@dataclass
class CutoffsSettings:
    """The options of `deepenough cutoffs`."""

    counts: str | None = None
    """File of word counts or probabilities: numbers between spaces, or lines word<TAB>count."""
    tokens: str | None = None
    """File of token ids to count instead: .npy, a token folder of the cache, or raw numbers."""
    clusters: int | None = None
    """Number of clusters: the head and its tails. With --measure it is chosen if not given."""
    json: bool = False
    """Print one JSON object instead of a table."""
    keep_order: bool = False
    """Cut the words in the order given, as a model with these very ids will, without sorting."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the numbers in a raw token file."""
    vocab_size: int | None = None
    """Number of words of the token file's vocabulary, if some at its end never occur."""
    measure: bool = False
    """Choose by the time that a training step of the layer takes on this machine."""
    d_model: int = 128
    """Width of the hidden states (with --measure)."""
    div_value: float = 4.0
    """Each tail is narrower than the part before it by this factor (with --measure)."""
    batch_tokens: int = 1024
    """Tokens in a training step (with --measure)."""
    max_clusters: int = 5
    """Largest number of clusters to try (with --measure)."""


def main(argv: list[str]) -> int:
    """Read, solve, print."""
    words = [_with_underscores(word) for word in argv]
    settings = parse("cutoffs", CutoffsSettings, words, DESCRIPTION, EXAMPLE)
    _check(settings)

    from deepenough.nn.cutoffs import optimal_cutoffs, partition_cost

    given = _read(settings)
    masses = given if settings.keep_order else _sorted(given)
    choice: Choice | None = None
    if settings.measure:
        choice = _choose(masses, settings)
        cutoffs, seconds = choice.best.cutoffs, choice.solve_seconds
        cost = partition_cost(masses, cutoffs)
    else:
        assert settings.clusters is not None
        start = time.perf_counter()
        partition = optimal_cutoffs(masses, settings.clusters)
        seconds = time.perf_counter() - start
        cutoffs, cost = partition.cutoffs, partition.cost
    if masses is not given and (masses != given).any():
        print(
            "deepenough: note: the counts were not in descending order and have been sorted. "
            "Cutoffs are ranks: they fit a model whose word ids go from frequent to rare. With the "
            f"ids as given these cutoffs cost {partition_cost(given, cutoffs):,.1f} instead of "
            f"{cost:,.1f}; --keep_order finds the best for them.",
            file=sys.stderr,
        )
    if settings.json:
        result = {"cutoffs": cutoffs, "cost": cost, "seconds": seconds}
        result |= {"clusters": len(cutoffs) + 1, "vocab_size": len(masses)}
        print(json.dumps(result | (_measured(choice) if choice else {})))
    else:
        _show(masses, cutoffs, cost, seconds)
        if choice:
            _show_choice(choice)
    return 0


def _with_underscores(word: str) -> str:
    """`--d-model=128` as `--d_model=128`."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def _check(settings: CutoffsSettings) -> None:
    """What can be refused before anything is read."""
    if (settings.counts is None) == (settings.tokens is None):
        raise UserError("Give either --counts FILE or --tokens FILE.")
    if settings.counts is not None and (settings.dtype or settings.vocab_size):
        raise UserError("Options --dtype and --vocab_size belong to --tokens; leave them out.")
    if settings.clusters is None and not settings.measure:
        raise UserError("Say how many clusters with --clusters K, or let --measure choose.")
    for name in ("clusters", "vocab_size", "d_model", "batch_tokens", "max_clusters"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"Option --{name} must be at least 1, not {value}.")
    if not settings.div_value >= 1:
        raise UserError(f"Option --div_value must be at least 1, not {settings.div_value}.")


def _read(settings: CutoffsSettings) -> npt.NDArray[Any]:
    from deepenough.nn.word_counts import count_tokens, read_counts

    if settings.counts is not None:
        return read_counts(settings.counts)
    assert settings.tokens is not None
    return count_tokens(settings.tokens, settings.dtype, settings.vocab_size)


def _sorted(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    import numpy as np

    return np.sort(counts)[::-1]


def _choose(masses: npt.NDArray[Any], settings: CutoffsSettings) -> Choice:
    from rich.console import Console
    from rich.progress import track

    from deepenough.nn.cutoff_choice import choose_cutoffs
    from deepenough.nn.softmax_cost import LayerShape

    console = Console(stderr=True)

    def show(items: Sequence[Any], title: str) -> Iterable[Any]:
        quiet = not console.is_terminal
        return track(items, title, console=console, transient=True, disable=quiet)

    return choose_cutoffs(
        masses,
        LayerShape(settings.d_model, settings.div_value, settings.batch_tokens),
        settings.max_clusters,
        settings.clusters,
        track=show,
    )


def _measured(choice: Choice) -> dict[str, Any]:
    """What --measure adds to the JSON object; times in seconds of a training step of the layer."""
    return {
        "measured_seconds": choice.best.measured,
        "fitted_seconds": choice.best.fitted,
        "fit_relative_error": choice.cost.relative_error,
        "candidates": [vars(candidate) for candidate in choice.candidates],
    }


def _show(masses: npt.NDArray[Any], cutoffs: list[int], cost: float, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Cutoffs {cutoffs} for {len(masses):,} words", title_justify="left")
    table.add_column("cluster")
    for column in ("words", "size", "share of tokens", "size x share"):
        table.add_column(column, justify="right")
    bounds = [0, *cutoffs, len(masses)]
    total = float(masses.sum(dtype="float64"))
    for number, (start, stop) in enumerate(pairwise(bounds)):
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
        f"A token costs {cost:,.1f} outputs on average instead of {len(masses):,} "
        f"({len(masses) / cost:,.1f} times fewer). Solved in {seconds:.3f} s.",
        highlight=False,
        soft_wrap=True,
    )


def _show_choice(choice: Choice) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Milliseconds of a training step, measured here", title_justify="left")
    for column in ("cutoffs", "best for"):
        table.add_column(column)
    for column in ("fitted", "measured"):
        table.add_column(column, justify="right")
    for candidate in choice.candidates:
        measured = "not run" if candidate.measured is None else f"{1e3 * candidate.measured:.2f}"
        table.add_row(
            str(candidate.cutoffs) if candidate.cutoffs else "none (full softmax)",
            candidate.best_for,
            f"{1e3 * candidate.fitted:.2f}",
            measured,
            style="bold" if candidate is choice.best else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Chosen: {choice.best.cutoffs or 'a full softmax, without cutoffs'}. The fitted times are "
        f"off by {choice.cost.relative_error:.0%} (median of {choice.cost.num_points} timings).",
        highlight=False,
        soft_wrap=True,
    )
