"""The progress bar says how fast and how long, on a terminal and elsewhere."""

import io
import re

import pytest
from rich.console import Console

from deepenough.training import logging as module
from deepenough.training.logging import Progress


def test_a_terminal_shows_a_bar_with_rate_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress(100, 0, "tokens", console=console) as progress:
        for done in range(1, 51):
            progress.advance(done, units=1024, seconds=0.1, loss=3.25)
    shown = screen.getvalue()
    assert "50/100" in shown
    assert "loss 3.250" in shown
    assert "10,240 tokens/s" in shown
    assert re.search(r"\d+ s left", shown)


def test_elsewhere_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    with Progress(100, 40, "tokens", console=Console(file=io.StringIO())) as progress:
        for done in range(41, 101):
            clock[0] += 10.0
            progress.advance(done, units=500, seconds=5.0, loss=2.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every 30 of 600 seconds
    # Of 60 steps to do 30 are done in 300 s, validations included; the rate is of steps alone.
    assert lines[9] == "step 70/100: loss 2.000, 100 tokens/s, 5 min left"
    assert lines[-1] == "step 100/100: loss 2.000, 100 tokens/s, 0 s left"


def test_the_end_is_always_said(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, 0, "tokens", console=Console(file=io.StringIO())) as progress:
        progress.advance(1, 10, 0.1, 1.0)
        progress.advance(2, 10, 0.1, 1.0)
    assert capsys.readouterr().err.startswith("step 2/2: loss 1.000, 100 tokens/s")


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True)
    with Progress(1, 0, "tokens", enabled=False, console=console) as progress:
        progress.advance(1, 10, 0.1, 1.0)
    assert screen.getvalue() == "" and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1.5 h"), (36000, "10.0 h")],
)
def test_durations_as_people_say_them(seconds: float, said: str) -> None:
    assert module._duration(seconds) == said
