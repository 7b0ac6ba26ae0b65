"""Choices that wait until the weights have learnt something."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepenough.config import resolve
from deepenough.par.training import ParSearch, search
from deepenough.runs import read_records


def test_choices_stay_uniform_until_their_time_has_come(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    changes = {"search.choose_after": 0.5, "search.alpha_lr": 10.0, "search.cost": "flops"}
    search(resolve(ParSearch, overrides=tiny(tmp_path / "run", changes)))
    records, _ = read_records(tmp_path / "run" / "metrics.jsonl")
    rows = {r.step: r.values["pi"] for r in records if r.kind == "train"}
    uniform = [[round(1 / 3, 6)] * 3] * 3
    assert all(rows[step] == uniform for step in range(1, 7))
    assert rows[12] != uniform
