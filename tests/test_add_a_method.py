"""A new method is one folder and one line of the registry: `docs/add-a-method.md`, done.

The package is copied, `toy_method/` put into it as `toy/`, and one line added to its registry. Then
the toy goes through the command line as any other method: help, training, a kill and a resumption,
evaluation, comparison, pictures and the report.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deepenough
from deepenough.runs import read_records

TOY = Path(__file__).parent / "toy_method"
ONE_LINE = '    Method("toy", "toy", "a stack of linear blocks that learns a slope"),\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the toy in it."""
    folder = tmp_path_factory.mktemp("source")
    original = Path(deepenough.__file__).parent
    package = folder / "deepenough"
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TOY, package / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    registry = package / "registry.py"
    text = registry.read_text(encoding="utf-8")
    assert text.endswith("),\n)\n")  # METHODS stands last
    registry.write_text(text.removesuffix(")\n") + ONE_LINE + ")\n", encoding="utf-8")
    return folder


def start(source: Path, folder: Path, program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(source: Path, folder: Path, *lines: str) -> str:
    """Run commands in one process and return what they printed."""
    calls = "".join(f"assert main({line.split()!r}) == 0\n" for line in lines)
    process = start(source, folder, f"from deepenough.__main__ import main\n{calls}")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


def losses(folder: Path) -> list[float]:
    """Return the recorded training losses of a run."""
    records, _ = read_records(folder / "metrics.jsonl")
    return [record.values["loss"] for record in records if record.kind == "train"]


def test_the_toy_is_in_the_help(source: Path, tmp_path: Path) -> None:
    output = run(source, tmp_path, "--help", "toy --help", "toy train --help")
    assert "toy train" in output and "find the slope of a line" in output
    assert "(at least -10 and at most 10)" in " ".join(output.split())
    assert "toy plot" in output


@pytest.mark.timeout(280)
def test_the_toy_goes_through_everything(source: Path, tmp_path: Path) -> None:
    options = "--steps 60 --log_every 1 --save_every 5 --valid_every 30"
    slow = "import time\nfrom deepenough.toy.training import ToyTask\nloss = ToyTask.loss\n"
    slow += "def wait(*a):\n    time.sleep(0.05)\n    return loss(*a)\nToyTask.loss = wait\n"
    words = f"toy train --out killed {options}".split()
    program = f"{slow}from deepenough.__main__ import main\nmain({words!r})"
    process = start(source, tmp_path, program)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-*5")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "model").exists()

    output = run(
        source,
        tmp_path,
        f"toy train --out killed --resume {options}",
        f"toy train --out whole {options}",
        "toy eval whole",
        "toy eval whole --blocks 1",
        "toy plot whole",
        "compare whole killed --rounds 2 --out compared",
        "compare whole --rounds 2 --blocks [1] --out grid",
        "report whole compared --out report.html",
    )
    assert "error 0.1" in output and "error 0.9" in output  # with all blocks, and with the first
    losses = [
        [
            r.values["loss"]
            for r in read_records(tmp_path / name / "metrics.jsonl")[0]
            if r.kind == "train"
        ]
        for name in ("killed", "whole")
    ]
    assert len(losses[0]) == 60
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    assert (tmp_path / "whole" / "plots" / "toy_error.png").is_file()
    frontier = json.loads((tmp_path / "compared" / "frontier.json").read_text())
    assert [point["name"] for point in frontier["points"]] == 2 * [
        "3 blocks",
        "2 blocks",
        "1 blocks",
    ]
    assert [point["layers"] for point in frontier["points"]] == 2 * [3.0, 2.0, 1.0]
    asked = json.loads((tmp_path / "grid" / "frontier.json").read_text())
    assert [point["name"] for point in asked["points"]] == ["1 blocks"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "A line is learned." in page and "Error of the toy" in page
