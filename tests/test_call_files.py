"""A public call runs few of the project's files: as many as a reader must open to follow it."""

import runpy
from pathlib import Path

import pytest

from deepenough.decoding.native_weights import load_library

SCRIPT = runpy.run_path(str(Path(__file__).with_name("call_files.py")))
# Where nothing could be compiled, the backend that is used instead is one file more.
SPECULATE = 16 + (load_library() is None)
MOST = {"Shortcuts.fit": 18, "speculate(model).generate()": SPECULATE, "par search": 30}


@pytest.mark.parametrize("name", list(MOST))
def test_a_call_runs_few_files(name: str, tmp_path: Path) -> None:
    calls = SCRIPT["calls"](tmp_path)
    assert calls.keys() == MOST.keys()
    files = sorted(SCRIPT["files_run"](calls[name]))
    assert 3 <= len(files) <= MOST[name], "\n".join(files)
