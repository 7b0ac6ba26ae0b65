"""A model divided among two processes (FSDP) trains as one process does, and resumes as one.

The same two processes show what becomes of a job that has lost one: it says how it goes on, and
torchrun makes it go on.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from benchmarks.two_processes import METHODS, PLAN, Way, largest_difference, make_data, train_once
from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.runs import Record

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
STEPS = 4
LOST = "Another process of this training has ended, and it cannot go on without; go on with: "
Records = Callable[[Path], list[Record]]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="an older PyTorch"
)
def test_divided_models_train_as_whole_ones_and_a_restart_goes_on(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]], records: Records
) -> None:
    """All methods, in float64, where nothing but rounding may differ."""
    make_data(tmp_path)
    # Whole models (DDP) are trained by test_two_processes.py, and here by the job that is killed.
    before, of_two, after = ([way for way in ways if "ddp" not in way.name] for _, ways in PLAN)
    train_alone(before, tmp_path)
    settings = tiny(tmp_path / "whole", {"model.pattern": "ada", "model.dropout": 0.0})
    assert main(words_of(settings)) == 0
    killed = words_of(settings | {"out": tmp_path / "killed"})
    said = run_two(tmp_path, of_two, [*killed, "--resume"])
    train_alone(after, tmp_path)

    for method in METHODS:
        for way in (*of_two, *after):
            assert largest_difference(tmp_path / method, way.name) < 1e-9, (method, way)
        assert_same_model(tmp_path / method / "one", tmp_path / method / "fsdp")
        losses = json.loads((tmp_path / method / "one.json").read_text())
        assert len(set(losses.values())) == STEPS

    (line,) = (line for line in said.splitlines() if LOST in line)
    assert line.endswith(f"torchrun --nproc-per-node 2 -m deepenough {shlex.join(killed)} --resume")
    assert "going on from step 4" in (tmp_path / "killed" / "training.log").read_text()
    pairs = list(zip(records(tmp_path / "whole"), records(tmp_path / "killed"), strict=True))
    assert len(pairs) > 12
    for whole, again in pairs:
        assert (again.step, again.kind) == (whole.step, whole.kind)
        assert again.values["loss"] == pytest.approx(whole.values["loss"], rel=1e-5)


def words_of(settings: dict[str, Any]) -> list[str]:
    """The command that trains with these settings."""
    return ["par", "train", *(f"--{name}={value}" for name, value in settings.items())]


def train_alone(ways: list[Way], folder: Path) -> None:
    """Train in this process."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for way in ways:
            for method in METHODS:
                train_once(method, folder, STEPS, way)
    finally:
        torch.set_default_dtype(default)


def run_two(folder: Path, ways: list[Way], killed: list[str]) -> str:
    """Train in two processes, first with a command that is killed; return what they have said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = ["--max-restarts=1", "-m", "tests.distributed.divided_worker"]
    plan = json.dumps([vars(way) for way in ways])
    result = subprocess.run(
        [sys.executable, *launcher, *worker, str(folder), "float64", str(STEPS), plan],
        # By the loopback device alone, so that neither a network nor a name server is needed.
        env=os.environ
        | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        | {"KILLED_COMMAND": json.dumps(killed)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def assert_same_model(one: Path, divided: Path) -> None:
    """Weights in float64 to 1e-9, and the same config."""
    weights, same = (load_file(run / "model" / "model.safetensors") for run in (one, divided))
    assert weights.keys() == same.keys() and weights
    for name, weight in weights.items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(same[name], weight, rtol=1e-9, atol=1e-9, msg=name)
    first, second = (json.loads((run / "model/config.json").read_text()) for run in (one, divided))
    assert first == second


def test_one_process_has_nothing_to_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["par", "train", "--data", "x", "--out", str(tmp_path / "run"), "--parallel", "fsdp"]
    assert main(words) == 2
    assert "start several with torchrun, or leave it at ddp" in capsys.readouterr().err


def test_the_batch_script_is_one_and_starts_a_command() -> None:
    script = ROOT / "examples" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    (line,) = re.findall(r"-m deepenough (.*?) &$", script.read_text(), re.MULTILINE | re.DOTALL)
    method, verb, *words = shlex.split(line.replace("\\\n", " "))
    name = f"{method} {verb}"
    config = parse_command(commands()[name], name, words)
    assert config.resume and config.train.parallel == "fsdp"
