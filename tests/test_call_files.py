"""A public call runs few of the project's files: as many as a reader must open to follow it."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).with_name("call_files.py")))
MOST = {"Shortcuts.fit": 18, "speculate(model).generate()": 12, "par search": 26}


@pytest.mark.parametrize("name", list(MOST))
def test_a_call_runs_few_files(name: str, tmp_path: Path) -> None:
    calls = SCRIPT["calls"](tmp_path)
    assert calls.keys() == MOST.keys()
    files = sorted(SCRIPT["files_run"](calls[name]))
    assert 3 <= len(files) <= MOST[name], "\n".join(files)
