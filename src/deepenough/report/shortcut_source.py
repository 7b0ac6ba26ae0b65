"""What the figures of shortcuts read from a run: tables of pairs, curves of modes.

As in `source`, values are checked here, once: a number that is missing, infinite or outside the
range of its quantity is not there, a table that is not square is none, and of two measurements of
the same thing the later counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepenough.report.source import Run, number

Values = Mapping[str, Any]
Points = tuple[np.ndarray, np.ndarray]

#: The replacements of a whole jump over layers, and those inside the blocks, in drawing order.
JUMPS = ("id", "mat", "affine", "tuned")
SUBMODULES = ("attention", "feed_forward", "norms")

#: Shares computed in float32 may leave [0, 1] by this much.
ROUNDING = 1e-5


def share(value: Any) -> float | None:
    """`value` as a number from 0 to 1, or None."""
    found = number(value)
    if found is None or not -ROUNDING <= found <= 1 + ROUNDING:
        return None
    return min(max(found, 0.0), 1.0)


def square(value: Any) -> np.ndarray | None:
    """`value` as a square table of floats, NaN where it has no finite number; None if it is none.

    A table has two layers or more and says something about at least one pair.
    """
    try:
        table = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        return None
    if table.ndim != 2 or table.shape[0] != table.shape[1] or len(table) < 2:
        return None
    table[~np.isfinite(table)] = np.nan
    return table if np.isfinite(table).any() else None


def r2_tables(run: Run) -> dict[str, np.ndarray]:
    """Mode -> r^2 [from, to]; only tables as large as the last one, which is of the same model."""
    tables: dict[str, np.ndarray] = {}
    for record in run.records:
        table = square(record.values.get("table")) if record.kind == "r2" else None
        if table is not None:
            tables.pop(_mode(record.values), None)
            tables[_mode(record.values)] = table
    if not tables:
        return {}
    size = len(list(tables.values())[-1])
    return _in_order({mode: t for mode, t in tables.items() if len(t) == size})


def cka_table(run: Run) -> np.ndarray | None:
    """The last table of linear CKA between layers."""
    tables = [square(r.values.get("table")) for r in run.records if r.kind == "cka"]
    return next((t for t in reversed(tables) if t is not None), None)


def measured(run: Run, kind: str, key: str) -> dict[str, dict[float, Values]]:
    """Mode -> `key` -> values of the records of that kind, `key` rising, the modes in order."""
    found: dict[str, dict[float, Values]] = {}
    for record in run.records:
        at = number(record.values.get(key)) if record.kind == kind else None
        if at is not None:
            found.setdefault(_mode(record.values), {})[at] = record.values
    return _in_order({mode: dict(sorted(at.items())) for mode, at in found.items()})


def layer_curves(run: Run, name: str) -> dict[str, Points]:
    """Mode -> layers and values of one quantity; a mode without a value is not there."""
    check = share if name.startswith("precision") else number
    curves = {}
    for mode, by_layer in measured(run, "layer", "layer").items():
        points = [(layer, check(values.get(name))) for layer, values in by_layer.items()]
        known = [(layer, value) for layer, value in points if value is not None]
        if known:
            layers, values_ = np.array(known, dtype=float).T
            curves[mode] = (layers, values_)
    return curves


def exit_curves(run: Run) -> dict[str, Points]:
    """Mode -> share of layers saved and agreement, one point a threshold, by rising threshold."""
    curves = {}
    for mode, by_threshold in measured(run, "exit", "lambda").items():
        points = [(share(v.get("saved")), share(v.get("agreement"))) for v in by_threshold.values()]
        known = [(saved, agrees) for saved, agrees in points if None not in (saved, agrees)]
        if known:
            saved, agreement = np.array(known, dtype=float).T
            curves[mode] = (saved, agreement)
    return curves


def fixed_exit_curves(run: Run) -> dict[str, Points]:
    """The same for leaving at one layer always: saved 1 - layer / L, agreement precision@1."""
    curves = layer_curves(run, "precision_1")
    last = max((layers.max() for layers, _ in curves.values()), default=0.0)
    if last <= 0:
        return {}
    return {mode: (1 - layers / last, values) for mode, (layers, values) in curves.items()}


def fitted_model(run: Run) -> str:
    """The name of the model that the shortcuts are for, or nothing if the run does not say."""
    names = [r.values.get("model") for r in run.records if r.kind == "fit"]
    return next((name for name in reversed(names) if isinstance(name, str)), "")


def _mode(values: Values) -> str:
    return str(values.get("mode") or "mat")


def _in_order(by_mode: dict[str, Any]) -> dict[str, Any]:
    """Known modes first, in the order they are drawn in; unknown ones after them."""
    order = {mode: i for i, mode in enumerate(JUMPS + SUBMODULES)}
    return {mode: by_mode[mode] for mode in sorted(by_mode, key=lambda m: (order.get(m, 99), m))}
