"""Which pairs of layers are fitted, and in how many passes over the text when memory is short.

A plan maps each source layer to its targets, all later than itself. Its cost is one `d x d` block
of float64 for each pair and one more for the source's own Gram matrix, so pairs that share a source
are kept together. The last layer stands in the plan with no targets: its Gram matrix is needed to
compare it with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from deepenough.errors import UserError

Targets = Literal["all", "last"]
Plan = dict[int, tuple[int, ...]]

_BYTES_PER_NUMBER = 8
_MARGIN = 1.3
"""What a pass needs beside its statistics: the buffer of rows, later the maps of one source."""


def make_plan(num_layers: int, targets: Targets = "all") -> Plan:
    """The targets of every source of a model of `num_layers` layers (and so one state more)."""
    if num_layers < 1:
        raise UserError("Shortcuts need the states of at least two layers, h_0 and h_1.")
    if targets not in ("all", "last"):
        raise UserError(f"The targets {targets!r} are not known: choose 'all' or 'last'.")
    last = num_layers
    if targets == "last":
        return {**dict.fromkeys(range(last), (last,)), last: ()}
    return {i: tuple(range(i + 1, last + 1)) for i in range(last + 1)}


def pairs_of(plan: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """The pairs of a plan, source by source."""
    for source, targets in plan.items():
        for target in targets:
            yield source, target


def num_blocks(plan: Mapping[int, tuple[int, ...]]) -> int:
    """How many `d x d` blocks the statistics of a plan hold."""
    return sum(1 + len(targets) for targets in plan.values())


def plan_bytes(plan: Mapping[int, tuple[int, ...]], width: int) -> int:
    """Size of the statistics of a plan."""
    return num_blocks(plan) * width * width * _BYTES_PER_NUMBER


def split_plan(plan: Plan, width: int, limit: float | None) -> list[Plan]:
    """The plan cut into passes, each of which stays within `limit` bytes.

    A source whose targets fall in several passes is accumulated again in each, which gives the
    same maps: a map depends on its own pair and the source's Gram matrix only.
    """
    if limit is None:
        return [plan]
    block = width * width * _BYTES_PER_NUMBER * _MARGIN
    room = int(limit // block)
    if room < 2:
        raise UserError(
            f"A memory limit of {limit / 1e6:,.0f} MB is too small for maps of width {width}: "
            f"give at least {2 * block / 1e6:,.0f} MB."
        )
    passes: list[Plan] = [{}]
    free = room
    for source, targets in plan.items():
        rest = list(targets)
        while True:
            if free < 1 + min(1, len(rest)):
                passes.append({})
                free = room
            taken = tuple(rest[: free - 1])
            passes[-1][source] = taken
            free -= 1 + len(taken)
            rest = rest[len(taken) :]
            if not rest:
                break
    return passes
