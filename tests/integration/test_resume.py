"""A run that is killed and resumed is the uninterrupted one.

Here by a real kill of a real process, in a search with everything that has a state: dropout, two
optimisers, accumulation. `test_contract.py` stops every training command at several steps.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepenough.__main__ import main
from deepenough.par import training
from deepenough.training.trainer import Trainer

Tiny = Callable[..., dict[str, Any]]

SEARCH = {
    "search.optimise": "alternating",
    "search.alternate_every": 2,
    "search.alpha_lr": 30.0,
    "search.cost": "flops",
    "search.cost_weight": 0.3,
    "model.dropout": 0.2,
    "train.accumulate": 2,
}
# Records that span checkpoints, a memory longer than a segment, a text that begins anew.
COMMON = {"train.log_every": 3, "train.save_every": 4, "model.mem_len": 12}


@pytest.fixture(autouse=True)
def as_on_a_terminal() -> Iterator[None]:
    """Ctrl-C interrupts, though a shell may have started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def flags(command: str, settings: dict[str, Any], *more: str) -> list[str]:
    words = [f"--{name}={value}" for name, value in settings.items()]
    return ["par", command, *words, *more]


def measured(folder: Path) -> list[dict[str, Any]]:
    """All that was recorded but the clock's values."""
    clock = {"time", "seconds", "tokens_per_second", "crc"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def assert_same(one: Path, other: Path) -> None:
    """Records and weights agree to within a ten-thousandth; a lost state moves far more."""
    before, after = measured(one), measured(other)
    steps = [(record["kind"], record["step"]) for record in after]
    assert steps == [(record["kind"], record["step"]) for record in before]
    assert len(steps) == len(set(steps)) and steps
    for record, again in zip(before, after, strict=True):
        assert record.keys() == again.keys()
        for name, value in record.items():
            if isinstance(value, float):
                assert again[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            elif name == "pi":
                torch.testing.assert_close(
                    torch.tensor(again[name]), torch.tensor(value), rtol=1e-4, atol=1e-6
                )
            else:
                assert again[name] == value, name
    kept = load_file(one / "model" / "model.safetensors")
    found = load_file(other / "model" / "model.safetensors")
    assert kept.keys() == found.keys()
    for name in kept:
        torch.testing.assert_close(found[name], kept[name], rtol=1e-4, atol=1e-6)


def test_a_killed_process_is_resumed_exactly(tmp_path: Path, tiny: Tiny) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # Long enough for the kill to come in the middle.
    settings = tiny(killed, COMMON | SEARCH, steps=60, save_every=7, valid_every=40)
    command = [sys.executable, "-m", "deepenough", *flags("search", settings)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ.copy())
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or len(measured_so_far(metrics)) < 6):
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    if process.stderr:
        process.stderr.close()
    reached = measured_so_far(metrics)[-1]["step"]
    assert 0 < reached < 60
    assert not (killed / "model").exists()
    assert main(flags("search", settings, "--resume")) == 0
    settings["out"] = str(whole)
    assert main(flags("search", settings)) == 0
    assert_same(whole, killed)


def measured_so_far(metrics: Path) -> list[dict[str, Any]]:
    complete = metrics.read_text().split("\n")[:-1]
    return [json.loads(line) for line in complete]


def test_retraining_is_resumed_too(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that was through is not searched again; its retraining goes on where it was."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    changes = {"search.cost": "flops", "search.retrain": "scratch"}
    settings = tiny(whole, changes, steps=6)
    assert main(flags("search", settings)) == 0
    settings["out"] = str(broken)
    step = Trainer._step

    def in_derived(self: Trainer, number: int) -> Any:
        if self.run.path.name == "derived" and number == 5:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", in_derived)
        assert main(flags("search", settings)) == 130
    assert (broken / "derived" / "checkpoints" / "step-000000004").is_dir()
    assert main(flags("search", settings, "--resume")) == 0
    assert_same(whole, broken)
    assert_same(whole / "derived", broken / "derived")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_a_step_and_names_the_command_that_goes_on(
    tmp_path: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    code: int,
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "a run"
    step = Trainer._step

    def signalled(self: Trainer, number: int) -> Any:
        if number == 5:
            os.kill(os.getpid(), sent)
        return step(self, number)

    settings = tiny(stopped, {"model.dropout": 0.1}, log_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", signalled)
        assert main(flags("train", settings, "--overwrite")) == code
    assert (stopped / "checkpoints" / "step-000000006").is_dir()  # which no setting asks for
    assert not (stopped / "model").exists()
    said = capsys.readouterr().err.rpartition("go on with: deepenough ")[2]
    assert "--overwrite" not in said and said.endswith("--resume\n")
    assert main(shlex.split(said)) == 0
    assert main(flags("train", settings | {"out": whole})) == 0
    assert_same(whole, stopped)


def test_the_second_signal_stops_at_once(
    tmp_path: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def signalled(self: Trainer, number: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it goes on")

    monkeypatch.setattr(Trainer, "_step", signalled)
    settings = tiny(tmp_path / "run")
    assert main(flags("train", settings)) == 130
    assert "once more stops at once" in capsys.readouterr().err
    # Before a run has begun there is nothing to resume, and an earlier one is not taken for it.
    monkeypatch.setattr(training, "_prepare", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    words = flags("train", tiny(tmp_path / "other"), "--overwrite")
    assert main(words) == 130
    assert capsys.readouterr().err.endswith(f"go on with: {shlex.join(['deepenough', *words])}\n")


def test_the_advice_of_commands_can_be_followed(
    tmp_path: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each says what to do next, in words that work as they stand."""

    def follow(words: list[str]) -> list[str]:
        capsys.readouterr()
        assert main(words) == 0
        advice = capsys.readouterr().out.rpartition("next: deepenough ")[2]
        return shlex.split(advice)

    folder = tmp_path / "a run"
    settings = tiny(folder, {"search.cost": "flops", "model.num_blocks": 4}, steps=2)
    assert follow(flags("search", settings)) == ["par", "plot", str(folder)]
    retrain = follow(["par", "derive", str(folder), "--budget", "0.65"])
    assert main(retrain) == 0
    (derived,) = [r for r in measured(folder) if r["kind"] == "derive" and "budget" in r]
    config = json.loads((folder / "derived" / "model" / "config.json").read_text())
    assert config["pattern"] == derived["pattern"]
    settings = tiny(tmp_path / "trained", {"model.pattern": "d"}, steps=1)
    assert main(follow(flags("train", settings))) == 0
    assert capsys.readouterr().out.startswith("Once")
