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
    assert len(lines) == 28  # every 10 seconds first, every 30 later
    # After half of 60 steps of 10 seconds, validations included.
    assert "69/100 steps: loss 2.000, 5 min left" in lines
    with reading("bytes", console=elsewhere) as show:
        clock[0] += 30.0
        show(6000, None)
    assert capsys.readouterr().err == "6000 bytes: 200 bytes/s\n"


def test_slow_work_has_a_rate_from_its_second_piece_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first piece waits for a model to warm up, and would tell of hours that are minutes."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    with reading("texts", console=Console(file=io.StringIO())) as show:
        for done, seconds in ((1, 60.0), (2, 8.0), (3, 8.0)):
            clock[0] += seconds
            show(done, 100)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "1/100 texts: 60 s for one of the texts"
    assert last == "3/100 texts: 8 s for one of the texts, 13 min left"


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
