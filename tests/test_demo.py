"""The demo: every step is a command that parses, and a step that fails ends it with a sentence."""

from pathlib import Path

import pytest

from deepenough import demo
from deepenough.__main__ import main
from deepenough.cli import commands, parse_command
from deepenough.config import validate
from deepenough.demo import DemoConfig, demo_steps
from deepenough.runs import SHIPPED, Record, append_record


@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_every_step_is_a_command_that_parses(tmp_path, scale):
    table = commands()
    seen = set()
    config = DemoConfig(out=str(tmp_path / "my demo"), scale=scale)
    for _, words in demo_steps(config, SHIPPED):
        name = " ".join(words[:2]) if " ".join(words[:2]) in table else words[0]
        validate(parse_command(table[name], name, words[len(name.split()) :]))
        seen.add(name)
    expected = {"profile", "compare", "par search", "ponder parity", "lazy train", "report"}
    expected |= {"par generate", "ponder predict"}
    assert expected <= seen
    assert not (tmp_path / "my demo").exists()


def test_the_last_step_reports_all_that_was_made(tmp_path):
    steps = [words for _, words in demo_steps(DemoConfig(out=str(tmp_path)))]
    assert steps[-1][0] == "report"
    reported = {Path(word).name for word in steps[-1] if word.startswith(str(tmp_path))}
    made = {Path(words[words.index("--out") + 1]).name for words in steps[:-1] if "--out" in words}
    assert reported == made | {"report.html"}


def test_trained_models_that_are_installed_are_shown_and_reported(monkeypatch, tmp_path):
    (tmp_path / "ponder-sst2").mkdir()
    for place, found in ((None, []), (tmp_path, ["ponder-sst2"])):
        monkeypatch.setattr(demo, "package_folder", lambda _, place=place: place)
        assert [name for name in SHIPPED if demo.ships(name)] == found
        named = [words for _, words in demo_steps(DemoConfig(), found) if "ponder-sst2" in words]
        assert [words[0] for words in named] == (["ponder", "report"] if found else [])


def test_the_end_says_what_was_found_and_where_the_page_is(monkeypatch, tmp_path, capsys):
    run = tmp_path / "out" / "programs"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("method: lazy\n")
    append_record(run / "metrics.jsonl", Record(5, "programs", {"exact": 0.5}))
    page = tmp_path / "out" / "report.html"
    monkeypatch.setattr(demo, "ships", lambda name: name == "ponder-sst2")
    words = ["report", str(run), "--title", "a demonstration", "--out", str(page)]
    monkeypatch.setattr(demo, "demo_steps", lambda *_: [("page", words)])
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "50.0 % of programs never trained on" in told
    assert told.rstrip().endswith(f"page: {page}") and page.is_file()
    assert (tmp_path / "out" / "reviews.txt").read_text("utf-8").splitlines() == [*demo.REVIEWS]


def test_a_step_that_fails_ends_the_demo(monkeypatch, capsys):
    monkeypatch.setattr(demo, "demo_steps", lambda *_: [("nothing", ["par", "plot", "nowhere"])])
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "[1/1] nothing" in told and "There is no run folder nowhere" in told
    assert "The demo stopped at deepenough par plot nowhere" in told
    assert main(["demo", "--scale", "0"]) == 2
