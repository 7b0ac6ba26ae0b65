"""A few kills at fixed points, and what Ctrl-C and SIGTERM do; the rest is `make faults`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_commands_go_on_as_if_they_had_not_been() -> None:
    """Before a band of parity is recorded, between the parts of a comparison and a calibration."""
    command = [sys.executable, "-m", "tests.faults", "kills", "--sample"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count("ends alike") == 3
