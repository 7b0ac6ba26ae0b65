"""Documents show no measured figure that no result file holds, and the benchmark runner works.

Tables between `<!-- results: NAME -->` markers must be what `python -m benchmarks --render` writes.
Numbers with a unit in prose must be, rounded as shown, a recorded figure of that unit. In
docs/results.md this is stricter: every number with decimals counts, with or without a unit, and it
must stand in a table of its own section or in a result file that the section names, by its command,
its table or a comment `<!-- figures: NAME ... -->`.
"""

import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import runner  # noqa: E402
from benchmarks.figures import Figure, figures_of, interleaved, unit_of  # noqa: E402
from benchmarks.render import BLOCK, PAGES, render_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STRICT = "results.md"
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
#: Units as they are written, and the recorded units that they may stand for.
UNITS = {
    r"x\b|×": {"x"},
    r" times\b": {"x"},
    r" ?%": {"share", "x", None, "points"},
    r" ?ms\b| milliseconds\b": {"ms"},
    r" s\b| seconds\b": {"s"},
    r" minutes\b": {"min"},
    r" hours\b": {"h"},
    r" tokens a second\b| tokens/s\b": {"tokens/s"},
    r" steps/s\b| steps a second\b": {"steps/s"},
    r" [MG]B\b": {"MB"},
    r" BLEU\b": {"BLEU"},
    r" perplexity\b": {"perplexity"},
}
NUMBER = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?:" + "|".join(f"({unit})" for unit in UNITS) + r")?"
)
#: What looks like a measured figure and is none: targets, settings and constants, as written.
CONSTANTS = (
    # Settings.
    *("dropout 0.25", "(0.35, ", "torch 2.13", "threshold 0.5", "probability 0.2", "within 60 %"),
    *("target 0.1, weight 0.01", "0.6 of an epoch", "With 1.5 times the trained", "at most 65 %"),
    *("at most 5 % disagreement at 95 % confidence", "at 95 % agreement", "gives 5 % of its lines"),
    # Targets, and what others report.
    *("target, 1.1x", "target was 8x", "within 1 % of the", "at 35 % less", "at most 0.5 points"),
    *("at most 0.3 BLEU", "with 30 % fewer FLOPs and 20 % less", "target: at most 0.5"),
    *("about 11 hours", "final 39.41 perplexity", "within 2 %", "below 2 %", "All are of 95 %"),
    # Sizes of files, and the arithmetic of bounds.
    *("4.5 MB", "6 MB", "some 30 MB", "10 GB", "With 5 % and 95 %", "in 3 % of", "like 3 % of"),
    *(
        "up to 300 MB",
        "some 90 MB",
        "some 100 MB",
        "itself is 1 MB",
        "0.36 GB",
        "1.8 GB",
        "come within 2 s",
    ),
    *("up to 300 MB", "the aim of 0.75"),
    *("disagreement of 3 %", "(8.0 times fewer)", "37 minutes"),
)


def all_figures(names: set[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return recorded figures by `file/figure`, of all result files or of those named."""
    return {
        f"{path.stem}/{name}": figure
        for path in sorted(RESULTS.glob("*.json"))
        if names is None or path.stem in names
        for name, figure in runner.read_result(path)["figures"].items()
    }


def sections(text: str) -> Iterator[str]:
    """Yield a page's text from each heading to the next."""
    starts = [0, *(match.start() for match in HEADING.finditer(text)), len(text)]
    return (text[start:end] for start, end in pairwise(starts))


def results_named(section: str) -> set[str]:
    """Return the result files that a section names: in commands, tables and comments."""
    named = set(re.findall(r"python -m benchmarks ([\w-]+)", section))
    for words in re.findall(r"<!-- figures: (.*?) -->", section):
        named |= set(words.split())
    for match in BLOCK.finditer(section):
        template = (ROOT / "benchmarks" / "tables" / f"{match['name']}.md").read_text()
        named |= {match["name"], *re.findall(r"[{ ]([\w-]+)/", template)}
    stems = {path.stem for path in RESULTS.glob("*.json")}
    return {stem for stem in stems if stem in named or stem.partition("-")[0] in named}


def prose(section: str) -> str:
    """Return a section without code, tables that are rendered, comments, links and headings."""
    for pattern in (
        FENCE,
        BLOCK,
        re.compile(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL),
        HEADING,
    ):
        section = pattern.sub(" ", section)
    return re.sub(r"(?m)^ {4}.*$", "", section)


def shown_numbers(text: str, every_decimal: bool) -> Iterator[tuple[str, str, set[str | None]]]:
    """Yield numbers that look measured: text around them, the number, units it may have."""
    flat = " ".join(text.split())
    for constant in CONSTANTS:
        flat = flat.replace(constant, " ")
    for match in NUMBER.finditer(flat):
        number, *found = match.groups()
        units = next((u for u, f in zip(UNITS.values(), found, strict=True) if f), None)
        if units is None and not (every_decimal and "." in number):
            continue
        if units == {"x"} and "times" in match[0] and "." not in number:
            continue
        yield (
            flat[max(0, match.start() - 30) : match.end() + 20],
            number.rstrip(","),
            units or set(),
        )


def is_recorded(number: str, units: set[str | None], figures: dict[str, dict[str, Any]]) -> bool:
    """Return True if a figure, rounded as the number is, is the number."""
    value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
    for figure in figures.values():
        unit = figure.get("unit")
        if units and unit not in units:
            continue
        for recorded in (figure[key] for key in ("value", "low", "high") if key in figure):
            candidates = [recorded]
            if not units or "share" in units:  # a percentage, of it, beyond it, or left of it
                candidates += [100 * recorded, 100 * (recorded - 1), 100 * (1 - recorded)]
            if any(abs(abs(each) - value) <= 0.5001 * 10**-decimals for each in candidates):
                return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_render_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert (
        text.count("<!-- results:") == text.count("<!-- /results -->") == len(BLOCK.findall(text))
    )
    assert render_text(text) == text, "run python -m benchmarks --render"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_prose_are_recorded(page: Path) -> None:
    strict = page.name == STRICT
    unknown = []
    for section in sections(page.read_text(encoding="utf-8")):
        figures = all_figures(results_named(section) if strict else None)
        tables = " ".join(match[0] for match in BLOCK.finditer(section)) if strict else ""
        for around, number, units in shown_numbers(prose(section), strict):
            in_table = "." in number and re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", tables)
            if not in_table and not is_recorded(number, units, figures):
                unknown.append(f"{number} in “{around}”")
    assert not unknown, f"{page.name} shows figures that no result file holds:\n" + "\n".join(
        unknown
    )


def test_results_page_has_numbers_to_check() -> None:
    text = (ROOT / "docs" / STRICT).read_text(encoding="utf-8")
    assert len(list(shown_numbers(prose(text), True))) > 50
    assert len(BLOCK.findall(text)) > 30


def test_an_invented_number_is_noticed() -> None:
    figures = {"a/b": {"value": 1.859, "unit": "x"}, "a/c": {"value": 0.6893, "unit": "share"}}
    assert is_recorded("1.86", {"x"}, figures)
    assert not is_recorded("1.87", {"x"}, figures)
    assert not is_recorded("1.86", {"BLEU"}, figures)
    assert is_recorded("31", UNITS[r" ?%"], figures)
    assert not is_recorded("32", UNITS[r" ?%"], figures)
    (found,) = shown_numbers("It is 1.86x faster with 3 drafts, 2 times.", False)
    assert found[1:] == ("1.86", {"x"})


def test_result_files_have_the_schema() -> None:
    paths = sorted(RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        record = runner.read_result(path)
        keys = {"name", "claim", "command", "seeds", "date", "seconds", "commit", "machine"}
        assert keys | {"versions", "settings", "figures"} <= record.keys(), path.name
        assert record["name"] == path.stem
        assert record["machine"].keys() == runner.machine().keys(), path.name
        assert record["versions"].keys() == runner.versions().keys(), path.name
        assert record["figures"], path.name
        for name, figure in record["figures"].items():
            assert figure.keys() <= {"value", "unit", "low", "high"}, (path.name, name)
            low, high = figure.get("low", figure["value"]), figure.get("high", figure["value"])
            assert low <= figure["value"] <= high, (path.name, name)


#: Long benchmarks whose first result is still to come; an entry goes when its result is there.
NOT_RUN_YET = {
    *("decode_exit_frontier-smollm2", "decode_exit_frontier-stories15m", "decode_identity"),
    "par_encoder",
    *("decode_bench-bf16", "decode_bench-avx2"),
    *("growth-time", "growth-memory", "prepare_large"),
    *("lazy_translation-recipe_0", "lazy_translation-recipe_1", "lazy_translation-recipe_2"),
}


def test_every_benchmark_has_a_claim_and_a_result() -> None:
    found = runner.find_benchmarks()
    assert found
    for name, benchmark in found.items():
        assert benchmark.claim.endswith("."), name
        assert (RESULTS / f"{name}.json").is_file() != (name in NOT_RUN_YET), name


TOY = '''
"""Toys are fast.

More about toys.
"""

from pathlib import Path

QUICK = True
SEEDS = [3]
VARIANTS = {"red": {"size": 2}, "blue": {"size": 4}}


def measure(size: int = 1) -> dict:
    value = float(Path(__file__).with_name("value.txt").read_text())
    figures = {"times_faster": value, "seconds": size * value}
    return {"speed": figures, "settings": {"colour": "any"}}
'''


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "helper.py").write_text('"""No benchmark."""\n')
    (tmp_path / "value.txt").write_text("2.0")
    return tmp_path


def test_runner_writes_one_file_per_variant(toys: Path) -> None:
    assert runner.main(["toy"], folder=toys) == 0
    assert sorted(path.name for path in (toys / "results").iterdir()) == [
        "toy-blue.json",
        "toy-red.json",
    ]
    record = json.loads((toys / "results" / "toy-red.json").read_text())
    assert record["claim"] == "Toys are fast."
    assert record["seeds"] == [3]
    assert record["settings"] == {"size": 2, "colour": "any"}
    assert record["command"] == "python -m benchmarks toy-red"
    assert record["figures"]["speed.seconds"] == {"value": 4.0, "unit": "s"}
    assert record["seconds"] >= 0 and record["machine"]["system"]


def test_check_passes_and_fails(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--quick"], folder=toys) == 0
    assert runner.main(["--check", "--quick"], folder=toys) == 0
    (toys / "value.txt").write_text("3.0")
    assert runner.main(["--check", "toy-red"], folder=toys) == 1
    output = capsys.readouterr().out
    assert "OUTSIDE  speed.times_faster: 3" in output
    assert "shown    speed.seconds: 6" in output  # seconds depend on the machine


def test_check_fails_if_a_recorded_figure_is_missing() -> None:
    recorded = {"figures": {"a": {"value": 1.0}, "b": {"value": 1.0, "low": 0.5, "high": 1.5}}}
    lines, good = runner.compare(recorded, {"figures": {"b": {"value": 1.54}}})
    assert not good
    assert "MISSING  a" in lines[0]
    assert "ok" in lines[1]  # within the interval widened by 5 % of the value


def test_a_failing_benchmark_does_not_stop_the_others(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toys / "broken.py").write_text(TOY.replace("from pathlib", "import nothing\nfrom pathlib"))
    assert runner.main(["--all"], folder=toys) == 1
    assert "FAILED: broken-red: No module named 'nothing'" in capsys.readouterr().out
    assert (toys / "results" / "toy-red.json").is_file()


def test_a_benchmark_without_its_data_is_skipped(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["toy-red"], folder=toys) == 0
    lines = 'from benchmarks.figures import require\n    require("nowhere", "fetch it.")\n    value'
    (toys / "toy.py").write_text(TOY.replace("value", lines, 1))
    assert runner.main(["--check", "toy-red"], folder=toys) == 0
    assert "SKIPPED: toy-red: nowhere is missing: fetch it." in capsys.readouterr().out


def test_options_reach_the_benchmark(toys: Path) -> None:
    assert runner.main(["toy-red", "size=5"], folder=toys) == 0
    record = json.loads((toys / "results" / "toy-red.json").read_text())
    assert record["figures"]["speed.seconds"]["value"] == 10.0
    assert record["command"] == "python -m benchmarks toy-red size=5"


def test_unknown_names_are_refused(toys: Path) -> None:
    with pytest.raises(SystemExit, match="There is no benchmark tot"):
        runner.main(["tot"], folder=toys)


def test_list_imports_nothing(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toys / "broken.py").write_text(TOY.replace("from pathlib", "import nothing\nfrom pathlib"))
    assert runner.main(["--list"], folder=toys) == 0
    assert "broken-red (quick, seeds [3])" in capsys.readouterr().out


def test_interleaved_takes_turns() -> None:
    calls: list[tuple[str, int]] = []
    functions = {name: lambda n, name=name: calls.append((name, n)) for name in "ab"}
    timings = interleaved(functions, rounds=2, inputs=[1, 2], warmup=0)
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 2
    timings.seconds = {"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 4.0]}
    assert timings.ratio("b", "a") == Figure(2.0, "x", 1.0, 2.0)
    assert timings.best("a") == Figure(1.0, "s", 1.0, 4.0)
    assert timings.rate("a", 8, "tokens/s") == Figure(8.0, "tokens/s", 2.0, 8.0)


def test_figures_are_named_by_their_path() -> None:
    found = figures_of({"a": {"bleu": 38.0, "x": [1, 2]}, "b": Figure(0.5, "x", 0.4, 0.6)})
    assert list(found) == ["a.bleu", "a.x.0", "a.x.1", "b"]
    assert found["a.bleu"].unit == "BLEU"
    assert found["b"].low == 0.4
    with pytest.raises(TypeError, match="settings"):
        figures_of({"name": "text"})
    assert unit_of("loop.tokens_per_second") == "tokens/s"
    assert unit_of("count") is None
