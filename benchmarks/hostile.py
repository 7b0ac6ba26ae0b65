"""Hostile files do no more than end a command with a sentence.

Pickles that call functions or show memory, safetensors with lying headers, JSON and YAML that grow
without end, markup in names, models with code of their own: tests/faults/hostile.py.
"""

from __future__ import annotations

from typing import Any

from tests.faults.hostile import run

QUICK = True
SEEDS = [0]


def measure(seed: int = 0) -> dict[str, Any]:
    """Give every file to what reads such files, and count the outcomes."""
    return {"files": run(seed)}
