"""Progress says how fast and how long, on a terminal and elsewhere."""

import io
import re

import pytest
from rich.console import Console

from deepenough.training import logging as module
from deepenough.training.logging import reading


def test_a_terminal_shows_a_bar_with_rate_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with reading("texts", console=console) as show:
        for done in range(1, 51):
            show(done, 100)
    shown = screen.getvalue()
    assert "reading" in shown and "50/100" in shown
    assert re.search(r"[\d,]+ texts/s, \d+ s left", shown)


def test_elsewhere_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    elsewhere = Console(file=io.StringIO())
    with reading("steps", "training", start=40, console=elsewhere) as show:
        for done in range(41, 101):
            clock[0] += 10.0
            show(done, 100, "loss 2.000")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every 30 of 600 seconds
    # Of 60 steps to do 30 are done in 300 s, validations included.
    assert lines[9] == "70/100 steps: loss 2.000, 5 min left"
    with reading("bytes", console=elsewhere) as show:
        clock[0] += 30.0
        show(6000, None)
    assert capsys.readouterr().err == "6000 bytes: 200 bytes/s\n"


def test_other_processes_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal)
        with reading("steps", enabled=False, console=console) as show:
            show(1, 1)
        assert screen.getvalue() == "" and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1.5 h"), (36000, "10.0 h")],
)
def test_durations_as_people_say_them(seconds: float, said: str) -> None:
    assert module._duration(seconds) == said
