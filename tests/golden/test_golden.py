"""What the code computes is what it computed when the golden figures were recorded (`record.py`).

Floats agree within a relative tolerance, or an absolute one near zero; everything else is equal.
Arithmetic of another processor moves the last digits, and 40 steps of an optimiser let them grow:
tolerances are per case, and tight where a figure comes from one forward or a closed form.
"""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(path: Path) -> ModuleType:
    """Return the module `record.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("golden_record", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


golden = _load(Path(__file__).with_name("record.py"))

TRAINED = (2e-3, 1e-4)
"""Relative and absolute tolerance of what 40 steps of training lead to."""
CLOSED = (1e-5, 1e-6)
"""Of what is counted, solved for, or computed in one forward."""
SOLVED = (1e-5, 1e-5)
"""Of single entries of maps that were solved for in float32, which may be far below their norm."""
TOLERANCES: dict[str, tuple[float, float]] = {
    "par_derive": CLOSED,
    "cutoffs": CLOSED,
    "shortcut_fit": SOLVED,
    "decode_full": CLOSED,
    "decode_speculative": CLOSED,
    "decode_exit": SOLVED,
    "flops": CLOSED,
}


def differences(found: Any, kept: Any, tolerance: tuple[float, float], place: str) -> list[str]:
    """Return a line for every place at which two figures differ."""
    if isinstance(kept, float) or isinstance(found, float):
        if not _is_number(found) or not _is_number(kept):
            return [f"{place}: {found!r} is not {kept!r}"]
        relative, absolute = tolerance
        close = math.isclose(found, kept, rel_tol=relative, abs_tol=absolute)
        return [] if close else [f"{place}: {found!r} is not near {kept!r}"]
    if type(found) is not type(kept):
        return [f"{place}: {found!r} is not {kept!r}"]
    if isinstance(kept, dict):
        if set(found) != set(kept):
            return [f"{place}: the keys {sorted(found)} are not {sorted(kept)}"]
        pairs = [(found[name], kept[name], f"{place}.{name}") for name in kept]
    elif isinstance(kept, list):
        if len(found) != len(kept):
            return [f"{place}: {len(found)} entries are not {len(kept)}"]
        pairs = [(a, b, f"{place}[{n}]") for n, (a, b) in enumerate(zip(found, kept, strict=True))]
    else:
        return [] if found == kept else [f"{place}: {found!r} is not {kept!r}"]
    return [line for a, b, where in pairs for line in differences(a, b, tolerance, where)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(data: Any) -> int:
    """Return how many single figures there are."""
    if isinstance(data, dict | list):
        return sum(map(count, data.values() if isinstance(data, dict) else data))
    return 1


@pytest.mark.parametrize("name", golden.CASES)
def test_figures_are_those_that_were_recorded(name: str) -> None:
    kept = json.loads(golden.file_of(name).read_text(encoding="utf-8"))
    found = golden.compute(name)
    lines = differences(found, kept, TOLERANCES.get(name, TRAINED), name)
    shown = "\n".join(lines[:20])
    assert not lines, f"{len(lines)} of {count(kept)} figures differ:\n{shown}"
    assert count(found) == count(kept) >= 10


def test_every_file_has_its_case() -> None:
    files = {path.stem for path in Path(__file__).parent.glob("*.json")}
    assert files == set(golden.CASES)
    assert set(golden.CASES) >= set(TOLERANCES)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ({"a": 1.0}, {"a": 1.1}),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": 1.0, "b": 1}, {"a": 1.0}),
        ([1, 2], [1, 2, 3]),
        ([1, 2], [1, 3]),
        ("text", "test"),
        (True, 1),
        (None, 0.0),
        (float("nan"), 1.0),
    ],
)
def test_a_difference_is_seen(found: Any, kept: Any) -> None:
    assert differences(found, kept, TRAINED, "here")
    assert not differences(kept, kept, TRAINED, "here")
