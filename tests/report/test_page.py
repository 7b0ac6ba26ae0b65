"""The report: what it says, and what it survives."""

import json
import re
import shutil
from typing import Any

import pytest

from deepenough.__main__ import main
from deepenough.errors import UserError
from deepenough.report.page import MAX_BYTES, compose, read_sources
from deepenough.report.page_parts import Limits, line, thin

STEPS = 40
"""Recorded steps of the search."""


def data_of(content: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', content, re.S)
    assert found is not None
    return json.loads(found[1])


def test_every_section_is_there_with_its_figures_and_commands(folders, tmp_path, capsys):
    file = tmp_path / "new" / "report.html"
    assert main(["report", *map(str, folders), "-o", str(file), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    content = file.read_text()
    kinds = [figure["kind"] for figure in data_of(content)]
    assert set(kinds) == {"frontier", "tokens", "lines", "heat", "frames", "image", "bars"}
    assert "<h1>A &amp; B</h1>" in content
    for command in (
        "deepenough compare &#x27;runs/my own&#x27; --out=runs/both",
        f"deepenough search --config {folders[1]}/config.yaml",
        f"deepenough shortcut eval {folders[2]}",
        f"deepenough ponder eval {folders[3]}",
        f"deepenough lazy eval {folders[4]}",
        f"deepenough lazy plot {folders[4]} --source",
    ):
        assert command in content
    titles = re.findall(r"<h2 id=.section-\d+.>(.*?)</h2>", content)
    assert [title.partition(":")[0] for title in titles] == [
        "Frontier", "PAR search", "Language model", "Shortcuts", "Ponder", "Lazy",
    ]  # fmt: skip
    for sentence in (
        "The intervals do not tell it from “early”, which is 2.00 times as fast",
        "The search chose ad (1 attention, 1 dense)",
        "saves 25.0 % of the layers",
        "Parity harder than any of them: 90.0 % right",
        "Perplexity on the test text: 42",
        "50.0 % of programs never seen are executed",
    ):
        assert sentence in content


def test_a_lazy_run_shows_gates_similarity_and_rest(folders):
    figures = {each["title"]: each for each in data_of(compose(read_sources(folders[4:]), "x"))}
    for name in ("program", "output"):
        assert figures[f"Tokens of the {name}: gate"]["values"] == [[0.4, 0.1], [0.3, 0.0]]
        assert figures[f"Tokens of the {name}: similarity"]["values"][0] == [0.5, 0.9]
    assert figures["Tokens of the program, shaded by their steps"]["depth"] == [2, 1]
    assert figures["When tokens come to rest"]["series"][0]["values"] == [3, 6]
    moving = figures["How much is still moving"]["series"]
    assert [each["name"] for each in moving] == [
        "mean of 9 programs",
        "this program",
        "this output",
    ]


def test_points_are_linked_to_the_section_of_their_run(folders):
    both = (folders[::2], folders[:1])
    linked, alone = (data_of(compose(read_sources(some), "x"))[0] for some in both)
    assert {point["section"] for point in linked["points"]} == {1}
    assert {point["section"] for point in alone["points"]} == {None}
    assert {point["folder"] for point in alone["points"]} == {str(folders[2])}


def test_what_a_search_led_to_is_shown_once(folders):
    named = [folders[1], folders[1] / "derived"]
    paths = [path for path, _ in read_sources(named).runs]
    assert paths == [str(path) for path in named]


def test_nothing_is_loaded_and_markup_stays_text(folders, evil):
    content = compose(read_sources(folders), evil)
    assert "<script>alert" not in content and "<img src=x" not in content
    assert content.count("<script") == 2
    assert not re.search(r'(src|href)="?https?:', content)
    assert "default-src 'none'" in content
    tokens = [figure for figure in data_of(content) if figure["kind"] == "tokens"]
    assert any("onerror" in token for figure in tokens for token in figure["tokens"])


def test_a_page_too_large_is_thinned_and_says_so(folders):
    sources = read_sources(folders)
    whole = compose(sources, "x")
    assert len(whole.encode()) <= MAX_BYTES and "Thinned" not in whole
    picture = next(f for f in data_of(whole) if f["kind"] == "image")["source"]
    small = compose(sources, "x", max_bytes=len(whole.encode()) - 1)
    fewer = next(f for f in data_of(small) if f["kind"] == "image")["source"]
    assert len(fewer) < len(picture)  # the moving picture has every second frame
    assert "pictures of the moving one" in small
    smaller = compose(sources, "x", max_bytes=len(whole.encode()) - len(picture))
    frames = next(f for f in data_of(smaller) if f["kind"] == "frames")["frames"]
    assert 2 <= len(frames) < STEPS
    assert frames[-1]["step"] == STEPS * 10
    assert f"/search: {len(frames)} of {STEPS + 1} recorded steps on the slider" in smaller
    assert "the moving picture is left out" in smaller
    assert not [f for f in data_of(smaller) if f["kind"] == "image"]
    points = len(next(f for f in data_of(smaller) if f["title"] == "Loss")["series"][0]["x"])
    if points < STEPS:  # said at the figure, and at the end
        assert smaller.count(f"{points} of {STEPS} points of “training”") == 2
    with pytest.raises(UserError, match=r"larger than 0\.01 MB"):
        compose(read_sources(folders[2:3]), "x", max_bytes=10_000)


def test_every_line_that_is_thinned_says_so():
    limits = Limits(points=3)
    assert "of" not in line("short", [1, 2, 3], [1, 2, 3], limits)
    long = line("long", range(9), range(9), limits)
    assert long["x"] == [0, 4, 8] and long["of"] == 9


def test_a_damaged_line_is_said_and_a_run_without_records_is_left_out(tmp_path, search_run, capsys):
    good, empty = search_run(tmp_path / "good"), tmp_path / "empty"
    with open(good / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss"\n')
    empty.mkdir()
    (empty / "config.yaml").write_text("run: {folder: x}\n")
    out = tmp_path / "report.html"
    assert main(["report", str(good), str(empty), "-o", str(out)]) == 0
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
    assert main(["report", *words, "-o", str(tmp_path / "out.html")]) == 2
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
    code = main(["report", str(folders[2]), str(half), "-o", str(out)])
    told = capsys.readouterr().err
    assert "half" in told
    if what == "frontier":  # a comparison cannot be read without its one file
        assert code == 2 and "make it again with deepenough compare" in told
    else:
        assert code == 0 and "Shortcuts" in out.read_text()
        assert "half" in out.read_text()


def test_markdown_with_pictures(folders, tmp_path):
    file = tmp_path / "report.md"  # whose name tells that it is to be Markdown
    assert main(["report", *map(str, folders), "-o", str(file)]) == 0
    content = file.read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", content)
    drawn = ("1-frontier_layers", "2-blocks", "4-r2", "5-passes", "6-lazy_tokens", "6-lazy_rest")
    assert {f"report-figures/{name}.png" for name in drawn} <= set(pictures)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)
    assert "## " in content
    assert not [line for line in content.splitlines() if re.match(r"(?!    ).*<img", line)]
    assert not (tmp_path / "report-figures" / "drawing").exists()


def test_thinning_keeps_both_ends():
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]
    assert thin(range(101), 3) == [0, 50, 100]
    assert Limits().halved().frames == Limits().frames // 2
    assert [Limits(pictures=n).halved().pictures for n in (60, 16, 15, 0)] == [30, 8, 0, 0]


def test_a_file_among_the_folders_is_left_out_with_a_note(search_run, tmp_path, capsys):
    """As a report that an earlier call has written, where a pattern names all that is there."""
    run, other = search_run(tmp_path / "run"), tmp_path / "report.html"
    other.write_text("earlier")
    out = tmp_path / "my report.md"
    assert main(["report", str(run), str(other), "-o", str(out)]) == 0
    assert "is a file and no run, and was left out" in capsys.readouterr().err
    text = out.read_text()
    assert text.startswith("# Report: run, derived")
    assert "](my%20report-figures/" in text
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
