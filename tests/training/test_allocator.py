"""The hint to malloc is taken on glibc and harmless elsewhere."""

import ctypes
import platform
import resource
import subprocess
import sys
from typing import Any

import pytest

from deepenough.training.trainer import keep_freed_memory

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc on this machine")


@on_glibc
def test_freed_memory_is_not_given_back() -> None:
    """Pages are faulted in once, not at every allocation: in a process of its own."""
    program = """
import resource, sys
from deepenough.training.trainer import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = 48 << 20  # above the largest size up to which glibc adapts by itself
bytearray(block)
before = faults()
for _ in range(5):
    bytearray(block)[::4096] = bytes(block // 4096)
print(faults() - before)
"""
    counts = {
        how: int(subprocess.run([sys.executable, "-c", program, how], capture_output=True).stdout)
        for how in ("keep", "leave")
    }
    pages = (48 << 20) // resource.getpagesize()
    assert counts["leave"] > 4 * pages  # else there would be nothing to save
    assert counts["keep"] < 2 * pages


@pytest.mark.parametrize("missing", [OSError, AttributeError, TypeError])
def test_other_systems_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    def fail(_: Any) -> None:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", fail)
    keep_freed_memory()
