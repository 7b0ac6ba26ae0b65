"""A job one of whose processes is killed says how it goes on, and torchrun makes it go on."""

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

from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.runs import Record

pytestmark = pytest.mark.distributed

# The first process is killed: it alone writes, and the other one must speak.
WORKER = """
import os, signal, sys
from deepenough.__main__ import main
from deepenough.training.trainer import Trainer

step, is_first = Trainer._step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def killed(self, number):
    if number == 6 and is_first and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number)

Trainer._step = killed
sys.exit(main(sys.argv[1:]))
"""


def test_the_batch_script_is_one_and_starts_a_command() -> None:
    script = Path(__file__).parents[2] / "examples" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    (line,) = re.findall(r"-m deepenough (.*?) &$", script.read_text(), re.MULTILINE | re.DOTALL)
    method, verb, *words = shlex.split(line.replace("\\\n", " "))
    name = f"{method} {verb}"
    config = parse_command(commands()[name], name, words)
    assert config.resume and config.train.parallel == "fsdp"


def test_a_killed_process_ends_the_job_and_a_restart_goes_on(
    tmp_path: Path,
    tiny: Callable[..., dict[str, Any]],
    records: Callable[[Path], list[Record]],
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    settings = tiny(tmp_path / "whole", {"model.pattern": "ada", "model.dropout": 0.0})

    def words(**changes: str) -> list[str]:
        given = settings | changes
        return ["par", "train", *(f"--{name}={value}" for name, value in given.items())]

    assert main(words()) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "--max-restarts=1", str(tmp_path / "worker.py")]
    killed = words(out=str(tmp_path / "killed"))
    result = subprocess.run(
        [*command, *killed, "--resume"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = "Another process of this training has ended, and it cannot go on without; go on with: "
    (line,) = (line for line in result.stderr.splitlines() if said in line)
    assert line.endswith(f"torchrun --nproc-per-node 2 -m deepenough {' '.join(killed)} --resume")
    log = (tmp_path / "killed" / "training.log").read_text()
    assert "going on from step 4" in log
    pairs = list(zip(records(tmp_path / "whole"), records(tmp_path / "killed"), strict=True))
    assert len(pairs) > 12
    for whole, again in pairs:
        assert (again.step, again.kind) == (whole.step, whole.kind)
        assert again.values["loss"] == pytest.approx(whole.values["loss"], rel=1e-5)
    state = json.loads(
        (tmp_path / "killed" / "checkpoints" / "step-000000012" / "state.json").read_text()
    )
    assert state["step"] == 12
