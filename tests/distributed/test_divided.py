"""A model divided among two processes (FSDP) trains as one process does, and resumes as one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.two_processes import METHODS, PLAN, largest_difference, make_data, start, train_once
from deepenough.__main__ import main

pytestmark = pytest.mark.distributed

STEPS = 6


def test_divided_models_train_and_resume_as_whole_ones(tmp_path: Path) -> None:
    """All methods, in float64, where nothing but rounding may differ."""
    make_data(tmp_path)
    (_, before), (_, of_two), (_, after) = PLAN
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for ways in (before, after):
            for way in ways:
                for method in METHODS:
                    train_once(method, tmp_path, STEPS, way)
            if ways is before:
                start(2, tmp_path, "float64", STEPS, of_two)
    finally:
        torch.set_default_dtype(default)
    for method in METHODS:
        for way in (*of_two, *after):
            assert largest_difference(tmp_path / method, way.name) < 1e-9, (method, way)
        one, divided = (tmp_path / method / name / "model" for name in ("one", "fsdp"))
        weights, same = (load_file(place / "model.safetensors") for place in (one, divided))
        assert weights.keys() == same.keys() and weights
        for name, weight in weights.items():
            assert weight.dtype == torch.float64
            torch.testing.assert_close(same[name], weight, rtol=1e-9, atol=1e-9, msg=name)
        first, second = (
            json.loads((place / "config.json").read_text()) for place in (one, divided)
        )
        assert first == second
        losses = json.loads((tmp_path / method / "one.json").read_text())
        assert len(set(losses.values())) == STEPS


def test_one_process_has_nothing_to_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["par", "train", "--data", "x", "--out", str(tmp_path / "run"), "--parallel", "fsdp"]
    assert main(words) == 2
    assert "start several with torchrun, or leave it at ddp" in capsys.readouterr().err
