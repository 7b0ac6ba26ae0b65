"""Shortcuts fitted by two real processes are those of one: statistics add."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepenough.shortcut.modeling import Shortcuts

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("shortcut_worker.py")


def test_two_processes_fit_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # By the loopback device alone, so that neither a network nor a name server is needed.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(WORKER), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    alone = runpy.run_path(str(WORKER))["fit"]()
    assert len(alone.pairs) == 6
    for name in ("memory-0", "memory-1", "files-0", "files-1", "resumed-0", "resumed-1"):
        together = Shortcuts.from_pretrained(tmp_path / name)
        assert together.meta["fit"]["positions"] == alone.meta["fit"]["positions"]
        assert together.meta["data"] == alone.meta["data"]
        for pair in alone.pairs:
            torch.testing.assert_close(
                together.matrix(*pair), alone.matrix(*pair), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(
                together.biases[pair], alone.biases[pair], rtol=1e-5, atol=1e-5
            )
        torch.testing.assert_close(together.cka(), alone.cka(), rtol=1e-9, atol=0)
    for rank in range(2):
        answer = json.loads((tmp_path / f"answer-{rank}.json").read_text())
        assert answer["processes"] == 2
        assert "seed = 0 where this has 5" in answer["said"]  # every process hears it
