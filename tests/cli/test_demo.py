"""The demo: every step is a command that parses, and a step that fails ends it with a sentence."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from deepenough import __main__ as command_line
from deepenough.__main__ import main
from deepenough.cli import demo
from deepenough.cli import parse as parsing
from deepenough.cli.demo import DemoSettings, demo_steps
from deepenough.cli.legacy import COMMANDS, find_command


class Parsed(Exception):
    """What a command was told, before it does anything."""


@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_every_step_is_a_command_that_parses(monkeypatch, tmp_path, scale):
    parse = parsing.parse

    def stop(*arguments: Any, **options: Any) -> Any:
        raise Parsed(parse(*arguments, **options))

    settings = DemoSettings(folder=str(tmp_path / "my demo"), scale=scale)
    seen = []
    for _, words in demo_steps(settings):
        if words[0] in ("report"):
            continue
        command, rest = find_command(words)
        assert command in COMMANDS
        module = importlib.import_module("deepenough.cli." + command.replace(" ", "."))
        monkeypatch.setattr(module, "parse", stop)
        with pytest.raises(Parsed):
            module.main(rest)
        seen.append(command)
    assert {"shortcut fit", "compare", "search", "ponder parity", "lazy train"} <= set(seen)
    assert not (tmp_path / "my demo").exists()


def test_the_last_step_reports_all_that_was_made(tmp_path):
    steps = [words for _, words in demo_steps(DemoSettings(folder=str(tmp_path)))]
    assert steps[-1][0] == "report"
    reported = {Path(word).name for word in steps[-1] if word.startswith(str(tmp_path))}
    made = {
        Path(words[words.index(flag) + 1]).name
        for words in steps[:-1]
        for flag in ("--folder", "--out")
        if flag in words
    }
    assert reported == made | {"report.html"}


def test_a_step_that_fails_ends_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "demo_steps", lambda _: [("nothing", ["plot", "nowhere"])])
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "[1/1] nothing" in told and "There is no run folder nowhere" in told
    assert "The demo stopped at deepenough plot nowhere" in told
    assert command_line.main(["demo", "--scale", "0"]) == 2
