"""The report: what it says, what it survives, and how it behaves in a real browser."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepenough.__main__ import main
from deepenough.errors import UserError
from deepenough.report.page import compose, read_sources
from deepenough.report.page_parts import Limits, thin
from deepenough.runs import Metrics, Record

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STEPS = 40
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def write(folder: Path, records: list[Record], config: str = "") -> Path:
    folder.mkdir(parents=True)
    metrics = Metrics(folder / "metrics.jsonl")
    for record in records:
        metrics.append(record)
    (folder / "config.yaml").write_text(config or "run: {folder: x}\n")
    return folder


def search_run(folder: Path) -> Path:
    records = []
    for step in range(STEPS):
        sure = 0.34 + 0.6 * step / STEPS
        pi = [[sure, (1 - sure) / 2, (1 - sure) / 2], [(1 - sure) / 2, sure, (1 - sure) / 2]]
        values = {"loss": 5 - step / 20, "pi": pi, "tau": 1 - step / 50}
        records.append(Record(step * 10, "train", values))
    records.append(Record(STEPS * 10, "derive", {"pattern": "ad", "pi": pi}))
    return write(folder, records, "search: {tau: linear}\n")


def shortcut_run(folder: Path, word: str = " Paris") -> Path:
    tokens = ["The", " capital", " of", EVIL, word]
    words = [[f"w{layer}"] * 4 + ["w3"] for layer in range(3)] + [["w3"] * 5]
    lens = {
        "prompt": "".join(tokens), "mode": "mat", "tokens": tokens, "layers": [0, 1, 2, 3],
        "words": words, "probability": [[0.2 * (layer + 1)] * 5 for layer in range(4)],
        "agrees": [[word == "w3" for word in row] for row in words],
    }  # fmt: skip
    records = [Record(0, "fit", {"model": "tiny", "mode": "mat"})]
    records += [
        Record(0, "layer", {"mode": "mat", "layer": n, "precision_1": n / 3, "surprisal": 3.0 - n})
        for n in range(4)
    ]
    records += [
        Record(0, "exit", {"mode": "mat", "lambda": v, "saved": 1 - v, "agreement": v})
        for v in (0.2, 0.6, 1.0)
    ]
    records.append(Record(0, "saved", {"mode": "mat", "agreement": 0.99, "saved": 0.25}))
    table = [[1.0 - 0.1 * abs(a - b) for b in range(4)] for a in range(4)]
    records.append(Record(0, "r2", {"mode": "mat", "table": table}))
    records.append(Record(0, "lens", lens))
    return write(folder, records)


def ponder_run(folder: Path) -> Path:
    about = {"model": "ponder", "evaluation": 1}
    records = [
        Record(9, "ponder_exit", about | {"policy": "quantile", "setting": n / 4, "passes": n,
                                         "accuracy": 0.8 + n / 50})
        for n in (1, 2, 3)
    ]  # fmt: skip
    counts = {"by": "label", "groups": ["bad", EVIL], "counts": [[3, 2, 1], [1, 2, 3]]}
    records.append(Record(9, "ponder_passes", about | counts))
    records += [
        Record(9, "parity", {"lowest": n, "highest": n, "beyond": n > 2, "accuracy": 0.9,
                             "passes": float(n), "mechanism": "ponder"})
        for n in (1, 2, 3)
    ]  # fmt: skip
    return write(folder, records)


def comparison(folder: Path) -> Path:
    folder.mkdir(parents=True)
    points = [
        {"run": "mine", "mechanism": group, "name": name, "settings": {}, "quality": quality,
         "quality_low": quality - 0.02, "quality_high": quality + 0.02, "layers": cost,
         "flops": cost * 1e6, "milliseconds": cost, "milliseconds_low": cost - 0.2,
         "milliseconds_high": cost + 0.2, "optimal": optimal, "sample": sample}
        for group, name, quality, cost, optimal, sample in (
            ("full", "all", 0.95, 6.0, ["layers", "flops", "milliseconds"], None),
            ("exit", "early", 0.94, 3.0, ["layers", "flops", "milliseconds"],
             {"tokens": ["It", " is", EVIL], "depth": [None, 2, 6], "layers": 6}),
            ("exit", "worse", 0.70, 5.0, [], None),
        )
    ]  # fmt: skip
    task = {"kind": "writing", "data": "python", "split": "valid", "unit": "token",
            "quality": "agreement", "higher_is_better": True}  # fmt: skip
    content = {"task": task, "protocol": {"rounds": 7, "threads": 1}, "points": points}
    content["provenance"] = {"settings": {"runs": ["runs/my own"], "out": "runs/both"}}
    (folder / "frontier.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        comparison(root / "both"),
        search_run(root / "search"),
        shortcut_run(root / "shortcut"),
        ponder_run(root / "ponder"),
    ]


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
        "deepenough compare &#x27;runs/my own&#x27; --out runs/both",
        f"deepenough search --config {folders[1]}/config.yaml",
        f"deepenough shortcut eval {folders[2]}",
        f"deepenough ponder eval {folders[3]}",
    ):
        assert command in content
    for sentence in (
        "As good within the intervals, and 2.00 times as fast: “mine early”",
        "The search chose ad (1 attention, 1 dense)",
        "saves 25.0 % of the layers",
        "Parity harder than any of them: 90.0 % right",
    ):
        assert sentence in content


def test_nothing_is_loaded_and_markup_stays_text(folders):
    content = compose(read_sources(folders), EVIL)
    assert "<script>alert" not in content and "<img src=x" not in content
    assert content.count("<script") == 2
    assert not re.search(r'(src|href)="?https?:', content)
    assert "default-src 'none'" in content
    tokens = [figure for figure in data_of(content) if figure["kind"] == "tokens"]
    assert any("onerror" in token for figure in tokens for token in figure["tokens"])


def test_a_page_too_large_is_thinned_and_says_so(folders):
    sources = read_sources(folders)
    whole = len(compose(sources, "x").encode())
    still = compose(sources, "x", max_bytes=whole - 1)
    assert "search: the moving picture" in still
    small = compose(sources, "x", max_bytes=len(still.encode()) - 1)
    frames = next(f for f in data_of(small) if f["kind"] == "frames")["frames"]
    assert 2 <= len(frames) < STEPS
    assert frames[-1]["step"] == STEPS * 10
    assert f"search: {len(frames)} of {STEPS + 1} recorded steps on slider" in small
    with pytest.raises(UserError, match=r"larger than 0\.01 MB"):
        compose(sources, "x", max_bytes=10_000)


def test_a_damaged_line_is_said_and_a_run_without_records_is_left_out(tmp_path, capsys):
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


def test_markdown_with_pictures(folders, tmp_path):
    file = tmp_path / "report.md"
    assert main(["report", *map(str, folders), "--format", "markdown", "-o", str(file)]) == 0
    content = file.read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", content)
    assert {"report-figures/1-frontier_layers.png", "report-figures/2-blocks.png"} <= set(pictures)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)
    assert "## " in content
    assert not [line for line in content.splitlines() if re.match(r"(?!    ).*<img", line)]
    assert not (tmp_path / "report-figures" / "drawing").exists()


def test_thinning_keeps_both_ends():
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]
    assert thin(range(101), 3) == [0, 50, 100]
    assert Limits().halved().frames == Limits().frames // 2


# -- in a real browser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    switches: tuple[str, ...] = (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
    )
    # No name resolves; and what is scrolled to is there at once.
    switches += ("--host-resolver-rules=MAP * ~NOTFOUND", "--force-prefers-reduced-motion")
    for switch in (*switches, "--window-size=1200,900"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, folders: list[Path], tmp_path: Path) -> Iterator[Any]:
    """The report opened from a file; whatever is done to it, the console stays silent."""
    file = tmp_path / "report.html"
    file.write_text(compose(read_sources(folders), EVIL))
    browser.get_log("browser")
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    yield browser
    assert browser.get_log("browser") == []


def all_of(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def figure(page: Any, title: str) -> Any:
    return next(f for f in all_of(page, "figure") if title in f.text)


def test_charts_are_drawn_and_markup_is_shown_as_text(page):
    assert all(f.find_elements("css selector", "svg, img, button") for f in all_of(page, "figure"))
    assert len(all_of(page, ".chart svg .mark")) > 40
    assert page.execute_script("return document.images.length") == 1  # the moving picture alone
    assert "onerror=alert" in page.find_element("tag name", "h1").text
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_slider_moves_through_training(page):
    frames = figure(page, "Move the slider")
    slider = frames.find_element("css selector", "input[type=range]")
    before = frames.find_element("css selector", "output").text
    assert before.startswith("400")
    colors = "return [...arguments[0].querySelectorAll('rect')].map(r => r.getAttribute('fill'))"
    painted = page.execute_script(colors, frames)
    slider.send_keys("\ue011")  # Home
    assert frames.find_element("css selector", "output").text.startswith("0, temperature 1: ")
    assert page.execute_script(colors, frames) != painted


def test_tokens_are_shaded_and_open_their_lens(page):
    tokens = figure(page, "Choose a token").find_elements("css selector", ".tokens button")
    shades = {token.value_of_css_property("background-color") for token in tokens}
    assert len(tokens) == 5 and len(shades) > 1
    tokens[3].send_keys("\ue007")  # Enter: the keyboard reaches it
    dialog = page.find_element("id", "lens")
    assert dialog.is_displayed() and "onerror" in dialog.text
    rows = dialog.find_elements("css selector", "tr")
    assert len(rows) == 1 + 4 and "w3" in rows[1].text
    dialog.find_element("css selector", "button").click()
    assert not dialog.is_displayed()
    assert page.switch_to.active_element == tokens[3]


def test_the_frontier_changes_its_cost_and_hides_groups(page):
    chart = figure(page, "agreement against cost")
    assert len(chart.find_elements("css selector", "svg .mark")) == 3
    select = chart.find_element("css selector", "select")
    select.send_keys("blocks")
    assert "blocks run per token" in chart.find_element("css selector", ".chart").text
    buttons = chart.find_elements("css selector", ".legend button")
    next(b for b in buttons if b.text == "exit").click()
    assert len(chart.find_elements("css selector", ".chart > svg .mark")) == 1
    pressed = [
        b.get_attribute("aria-pressed")
        for b in chart.find_elements("css selector", ".legend button")
    ]
    assert pressed == ["true", "false"]


def test_data_is_behind_a_button(page):
    chart = figure(page, "agreement against cost")
    button = chart.find_element("css selector", ".show-data")
    button.click()
    rows = chart.find_elements("css selector", ".data tr")
    assert len(rows) == 4 and "0.94" in rows[2].text
    button.click()
    assert not chart.find_elements("css selector", ".data")
    for other in all_of(page, ".show-data"):  # and every figure has some
        page.execute_script("arguments[0].click()", other)
    assert len(all_of(page, ".data th")) > 20


def test_the_theme_switches(page):
    def ground() -> str:
        return str(page.find_element("tag name", "body").value_of_css_property("background-color"))

    before = ground()
    page.find_element("id", "theme").send_keys("\ue007")
    assert ground() != before
    page.find_element("id", "theme").click()
    assert ground() == before


def test_a_phone_needs_no_sideways_scrolling(page):
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
        sizes = (
            "return Math.min(...[...document.querySelectorAll('svg text')]"
            ".filter(t => t.textContent).map(t => t.getBoundingClientRect().height))"
        )
        assert page.execute_script(sizes) >= 10
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
