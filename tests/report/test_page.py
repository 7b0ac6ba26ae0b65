"""The report: what it says, and what it survives."""

import json
import re
import shutil
from typing import Any

import pytest

from deepenough.__main__ import main
from deepenough.figure import (
    QUESTIONS,
    Axis,
    Chart,
    FigureSpec,
    Frame,
    HeatMap,
    Line,
    as_json,
    thin,
)
from deepenough.report import page
from deepenough.report.page import compose, read_report, thinned
from deepenough.runs import Metrics, Record


def data_of(content: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', content, re.S)
    assert found is not None
    return json.loads(found[1])


def panel_of(content: str, name: str) -> dict[str, Any]:
    """Return the first panel of the figure of that name."""
    return next(figure for figure in data_of(content) if figure["name"] == name)["panels"][0]


def test_every_section_is_there_with_its_figures_and_commands(folders, tmp_path, capsys):
    file = tmp_path / "new" / "report.html"
    assert main(["report", *map(str, folders), "--out", str(file), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    content = file.read_text()
    kinds = {panel["kind"] for figure in data_of(content) for panel in figure["panels"]}
    assert kinds == {"chart", "heat", "scatter", "tokens", "diagram"}
    assert "<h1>A &amp; B</h1>" in content
    for command in (
        "deepenough compare &#x27;runs/my own&#x27; --out=runs/both",
        f"deepenough par search --config {folders[1]}/config.yaml",
        f"deepenough shortcut eval {folders[2]}",
        f"deepenough ponder eval {folders[3]}",
        f"deepenough lazy plot {folders[4]} --source",
    ):
        assert command in content
    assert re.findall(r"<h2 id=.question-\d+.>(.*?)</h2>", content) == list(QUESTIONS)
    titles = re.findall(r"<h3 id=.run-\d+.>(.*?)</h3>", content)
    assert [title.partition(":")[0] for title in titles] == [
        "Shortcuts", "PAR search", "PAR model", "Ponder", "Lazy", "Comparison", "PAR", "PAR",
    ]  # fmt: skip
    for sentence in (
        "“early” is not significantly worse (agreement 0.94) and 2.0 (1.4 to 2.8) times as fast",
        "The search chose ad (1 attention, 1 dense)",
        "25.0 % (20.0 to 30.0) at 99 % agreement with the last layer, read with a linear map",
        "Half of the tokens are decided by layer 2 of 3 (1 to 2), read with a linear map.",
        "Parity of vectors harder than any in training: 90.0 % correct",
        "Perplexity on the test text: 42",
        "50.0 % of programs never trained on are executed",
    ):
        assert sentence in content


def test_the_first_chart_and_the_footer(folders):
    report = read_report(folders)
    content = compose(report)
    overview = data_of(content)[0]
    assert overview["name"] == "overview" and overview["choice"] == "compute"
    time, flops = overview["panels"]
    assert [point["x"] for point in flops["points"]] == [1.0, 0.5, 0.83333]
    assert [point["x"] for point in time["points"]] == [1.0, 0.5, 0.83333]
    assert [point["y"] for point in time["points"]] == [1.0, 0.98947, 0.73684]
    assert time["points"][0]["x_low"] is not None and flops["points"][0]["x_low"] is None
    assert {point["optimal"] for point in time["points"]} == {None}
    footer = content.partition("<footer>")[2]
    assert "This page: deepenough 0." in footer and "My CPU, 1 thread, seed 0." in footer


def test_the_findings_stand_in_the_order_of_the_questions_with_their_commands(folders):
    content = compose(read_report(folders))
    summary = re.search(r'<ul class="summary".*?</ul>', content, re.S)
    assert summary is not None
    order = ["Half of the tokens", "The search chose", "Parity of", "of programs never", "early”"]
    places = [summary[0].index(words) for words in order]
    assert places == sorted(places)
    assert "<code class=next><span>deepenough </span><span>shortcut " in summary[0]
    assert '<a href="#run-0">Shortcuts: ' in summary[0]


def test_a_run_whose_method_is_unknown_still_shows_its_curves(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in range(3):
        metrics.append(Record(step, "train", {"loss": 1.0}))
    (entry,) = read_report([tmp_path]).entries
    assert entry.title.startswith("Training: ")
    assert [figure.command for figure in entry.section.figures] == [""]


def test_numbers_are_rounded_and_what_is_no_number_is_null():
    line = Line("a", [1.0, 1 / 3], [float("nan"), float("inf")])
    assert as_json(line)["x"] == [1.0, 0.33333] and as_json(line)["y"] == [None, None]


def test_points_are_linked_to_the_section_of_their_run(folders):
    both = (folders[::2], folders[:1])
    linked, alone = (panel_of(compose(read_report(some)), "frontier") for some in both)
    assert {point["section"] for point in linked["points"]} == {0}
    assert {point["section"] for point in alone["points"]} == {None}
    assert {point["folder"] for point in alone["points"]} == {str(folders[2])}


def test_what_a_search_led_to_is_shown_once(folders):
    named = [folders[1], folders[1] / "derived"]
    titles = [entry.title for entry in read_report(named).entries]
    assert len(titles) == len(set(titles)) == 4  # blocks, and training, of each


def test_nothing_is_loaded_and_markup_stays_text(folders, evil):
    content = compose(read_report(folders, evil))
    assert "<script>alert" not in content and "<img src=x" not in content
    assert content.count("<script") == 2
    assert not re.search(r'(src|href)="?https?:', content)
    assert "default-src 'none'" in content
    assert any("onerror" in token for token in panel_of(content, "lens")["tokens"])
    assert len(content) < 1_000_000


def test_long_lines_and_sliders_are_thinned_and_that_is_said(monkeypatch):
    line = Line("long", list(range(9)), list(range(9)), labels=list("abcdefghi"))
    frames = [Frame(str(n), [[0.0]]) for n in range(5)]
    heat = HeatMap(["r"], ["c"], [[0.0]], Axis(), Axis(), Axis(low=0.0, high=1.0), frames=frames)
    spec = FigureSpec("n", "t", "Caption.", [Chart(Axis(), Axis(), [line]), heat])
    assert thinned(spec) == spec
    monkeypatch.setattr(page, "MAX_POINTS", 3)
    monkeypatch.setattr(page, "MAX_FRAMES", 2)
    small = thinned(spec)
    assert small.panels[0].lines[0].x == [0, 4, 8]
    assert small.panels[0].lines[0].labels == ["a", "e", "i"]
    assert [frame.name for frame in small.panels[1].frames] == ["0", "4"]
    shown = "Shown: 3 of 9 points of “long”, 2 of 5 recorded steps."
    assert small.caption == f"Caption. {shown}"


def test_a_damaged_line_is_said_and_a_run_without_records_is_left_out(tmp_path, search_run, capsys):
    good, empty = search_run(tmp_path / "good"), tmp_path / "empty"
    with open(good / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss"\n')
    empty.mkdir()
    (empty / "config.yaml").write_text("method: par\n")
    out = tmp_path / "report.html"
    assert main(["report", str(good), str(empty), "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "1 unreadable line(s)" in told and "empty has no record" in told
    assert "1 unreadable line(s)" in out.read_text()


@pytest.mark.parametrize("kind", ["nothing", "absent", "empty", "broken"])
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, capsys, kind):
    place = tmp_path / "run"
    if kind in ("empty", "broken"):
        place.mkdir()
        name = "config.yaml" if kind == "empty" else "frontier.json"
        (place / name).write_text("{")
    words = [] if kind == "nothing" else [str(place)]
    assert main(["report", *words, "--out", str(tmp_path / "out.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("what", ["metrics", "config", "frontier"])
def test_a_folder_half_written_does_not_spoil_the_others(folders, tmp_path, capsys, what):
    """A run whose last line, settings or comparison the power failure cut."""
    half = tmp_path / "half"
    shutil.copytree(folders[1], half)
    name = {"metrics": "metrics.jsonl", "config": "config.yaml", "frontier": "frontier.json"}[what]
    (half / name).write_text('{"step": 4, "loss"' if what == "metrics" else "{ a: [")
    out = tmp_path / "report.html"
    code = main(["report", str(folders[2]), str(half), "--out", str(out)])
    told = capsys.readouterr().err
    assert "half" in told
    if what == "frontier":  # a comparison cannot be read without its one file
        assert code == 2 and "make it again with deepenough compare" in told
    else:
        assert code == 0 and "Shortcuts" in out.read_text()
        assert "half" in out.read_text()


def test_markdown_with_pictures(folders, tmp_path):
    file = tmp_path / "report.md"  # whose name tells that it is to be Markdown
    assert main(["report", *map(str, folders), "--out", str(file)]) == 0
    content = file.read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", content)
    drawn = (
        "0-overview_flops",
        "1-r2",
        "2-blocks",
        "4-passes",
        "5-lazy_tokens",
        "5-lazy_sentence",
        "6-frontier_layers",
    )
    assert {f"report-figures/{name}.png" for name in drawn} <= set(pictures)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)
    assert "## " in content
    assert not [line for line in content.splitlines() if re.match(r"(?!    ).*(?<!\\)<img", line)]


def test_thinning_keeps_both_ends():
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]
    assert thin(range(101), 3) == [0, 50, 100]


def test_a_file_among_the_folders_is_left_out_with_a_note(search_run, tmp_path, capsys):
    """As a report that an earlier call has written, where a pattern names all that is there."""
    run, other = search_run(tmp_path / "run"), tmp_path / "report.html"
    other.write_text("earlier")
    out = tmp_path / "my report.md"
    assert main(["report", str(run), str(other), "--out", str(out)]) == 0
    assert "is a file, no run, and was left out" in capsys.readouterr().err
    text = out.read_text()
    assert text.startswith("# Report: run, derived")
    assert "](my%20report-figures/" in text
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
