"""Block patterns: `aadad-` reads attention, attention, dense, attention, dense, identity.

`*` stands for a block that is still being searched; a SuperNet is a pattern of stars.
"""

from __future__ import annotations

from deepenough.errors import UserError

ATTENTION, DENSE, IDENTITY, OPEN = "a", "d", "-", "*"
BRANCHES = (ATTENTION, DENSE, IDENTITY)
"""The order of the branches in every table of probabilities."""

BRANCH_NAMES = {ATTENTION: "attention", DENSE: "dense", IDENTITY: "identity"}


def check_pattern(pattern: str, allow_open: bool = False) -> str:
    """The pattern itself, or a UserError that says what is wrong with it."""
    known = (*BRANCHES, OPEN) if allow_open else BRANCHES
    unknown = sorted(set(pattern) - set(known))
    if unknown:
        raise UserError(
            f"The pattern {pattern!r} has the unknown letter {unknown[0]!r}: "
            "use a for attention, d for dense and - for identity."
        )
    if not set(pattern) - {IDENTITY}:
        raise UserError(
            f"The pattern {pattern!r} has no block: give at least one a (attention) or d (dense)."
        )
    return pattern


def interleaved(num_blocks: int) -> str:
    """The Transformer-XL baseline: attention and dense in turn."""
    return "".join(ATTENTION if i % 2 == 0 else DENSE for i in range(num_blocks))
