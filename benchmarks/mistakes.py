"""Wrong command lines are refused in one sentence that says what to do, and change nothing.

Misspelt commands and options, values out of range, files that are missing or of another kind,
settings that exclude each other: the table of tests/faults/mistakes.py.
"""

from __future__ import annotations

from typing import Any

from tests.faults.mistakes import run

QUICK = True
SEEDS = [0]


def measure() -> dict[str, Any]:
    """Give every wrong command line, and count those that are not refused as they should be."""
    outcomes = run()
    bad = sum(bool(each.wrong) for each in outcomes)
    return {"lines": {"cases": len(outcomes), "refused": len(outcomes) - bad, "bad": bad}}
