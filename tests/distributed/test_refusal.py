"""Where one of two processes refuses, both end with its sentence instead of waiting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

WORKER = """
import sys, pathlib
import torch.distributed as dist
from deepenough.errors import UserError
from deepenough.training.distributed import agree

dist.init_process_group("gloo")
rank = dist.get_rank()

def check() -> int:
    if rank == 1:
        raise UserError("Only the second minds.")
    return rank

place = pathlib.Path(sys.argv[1]) / f"said-{rank}"
assert agree(lambda: 10 + rank) == 10 + rank
try:
    agree(check)
except UserError as error:
    place.write_text(str(error))
dist.destroy_process_group()
"""


def test_both_hear_what_one_refuses(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == "Only the second minds."
