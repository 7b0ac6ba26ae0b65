"""The demo: every step is a command that parses, and a step that fails ends it with a sentence."""

from pathlib import Path

import pytest

from deepenough import demo
from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.config import validate
from deepenough.demo import DemoConfig, demo_steps


@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_every_step_is_a_command_that_parses(tmp_path, scale):
    table = commands()
    seen = set()
    for _, words in demo_steps(DemoConfig(out=str(tmp_path / "my demo"), scale=scale)):
        name = " ".join(words[:2]) if " ".join(words[:2]) in table else words[0]
        validate(parse_command(table[name], name, words[len(name.split()) :]))
        seen.add(name)
    expected = {"shortcut fit", "compare", "par search", "ponder parity", "lazy train", "report"}
    assert expected <= seen
    assert not (tmp_path / "my demo").exists()


def test_the_last_step_reports_all_that_was_made(tmp_path):
    steps = [words for _, words in demo_steps(DemoConfig(out=str(tmp_path)))]
    assert steps[-1][0] == "report"
    reported = {Path(word).name for word in steps[-1] if word.startswith(str(tmp_path))}
    made = {Path(words[words.index("--out") + 1]).name for words in steps[:-1] if "--out" in words}
    assert reported == made | {"report.html"}


def test_a_step_that_fails_ends_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "demo_steps", lambda _: [("nothing", ["par", "plot", "nowhere"])])
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "[1/1] nothing" in told and "There is no run folder nowhere" in told
    assert "The demo stopped at deepenough par plot nowhere" in told
    assert main(["demo", "--scale", "0"]) == 2
