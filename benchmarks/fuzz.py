"""Bad input of eleven kinds ends with a right result or a sentence: no traceback, no hang.

A case is a function of the seed, its kind and its number. `make fuzz` runs the same and shows what
it finds; tests/fuzz says how cases are made, and what counts as bad.
"""

from __future__ import annotations

from typing import Any

from tests.fuzz.__main__ import run

QUICK = False
SEEDS = [0]


def measure(scale: float = 1.0, seed: int = 0) -> dict[str, Any]:
    """Run every kind with its own number of cases, times `scale`, and count the outcomes."""
    found = run(scale, seed)
    figures: dict[str, Any] = {
        name: {"cases": kind.cases, "refused": kind.refused, "bad": kind.bad.total()}
        for name, kind in found.items()
    }
    whole = {
        key: sum(part[key] for part in figures.values()) for key in ("cases", "refused", "bad")
    }
    return figures | {"all": whole | {"kinds": len(found)}, "settings": {"scale": scale}}
