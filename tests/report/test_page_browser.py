"""The report in a real browser: Chromium, from a file, without a network."""

import base64
import io
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from PIL import Image

from deepenough.report.page import compose, read_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
HOME, LEFT, RIGHT, DOWN = "\ue011", "\ue012", "\ue014", "\ue015"


pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def file(
    browser: Any, folders: list[Path], evil: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(compose(read_report(folders, evil)))
    return file


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The report opened from a file; whatever is done to it, the console stays silent."""
    browser.get_log("browser")
    browser.get(file.as_uri())
    assert browser.current_url.startswith("file://")
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def all_of(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def figure(page: Any, title: str) -> Any:
    return next(f for f in all_of(page, "figure") if title in f.text)


def test_charts_are_drawn_and_markup_is_shown_as_text(page):
    assert all(f.find_elements("css selector", "svg, img, button") for f in all_of(page, "figure"))
    assert len(all_of(page, ".chart svg .mark")) > 40
    assert page.execute_script("return document.images.length") == 0
    assert "onerror=alert" in page.find_element("tag name", "h1").text
    for kind in ("svg path", "svg rect.mark", "svg circle.mark"):
        assert all_of(page, f".chart {kind}"), kind


def test_the_slider_moves_through_training(page):
    frames = figure(page, "Block probabilities")
    slider = frames.find_element("css selector", "input[type=range]")
    colors = "return [...arguments[0].querySelectorAll('rect')].map(r => r.getAttribute('fill'))"

    def told() -> str:
        return str(frames.find_element("css selector", "output").text)

    assert told().startswith("step 390")
    painted = page.execute_script(colors, frames)
    slider.send_keys(HOME)
    assert told().startswith("step 0, temperature 1.00: ")
    assert page.execute_script(colors, frames) != painted
    slider.send_keys(RIGHT)
    assert told().startswith("step 10, ")
    slider.send_keys(LEFT)
    assert told().startswith("step 0, ")


def test_tokens_are_shaded_and_reached_by_arrows(page):
    tokens = figure(page, "after every token").find_elements("css selector", ".tokens .token")
    shades = {token.value_of_css_property("background-color") for token in tokens}
    assert len(tokens) == 5 and len(shades) > 1
    page.execute_script("arguments[0].focus()", tokens[0])
    tokens[0].send_keys(RIGHT, RIGHT, RIGHT)
    assert page.switch_to.active_element == tokens[3]
    assert "layer from which" in page.find_element("css selector", ".tip").text


def test_a_cell_of_the_lens_tells_what_is_likeliest(page, evil):
    lens = figure(page, "after every token")
    cells = lens.find_elements("css selector", ".scroll .mark")
    assert len(cells) == 4 * 5
    page.execute_script("arguments[0].focus()", cells[0])
    tip = page.find_element("css selector", ".tip")
    lines = tip.text.split("\n")
    assert lines[:2] == ["layer 0, after “The”", "1. w0 20%"]
    assert lines[2] == f"2. {evil.replace(' ', '␣')} 10%"
    assert lines[-3:] == [
        "entropy (nats): 1.5", "KL to the last layer (nats): 1.5", "rank of the real next token: 9"
    ]  # fmt: skip
    colors = (
        "return [...arguments[0].querySelectorAll('.scroll rect')].map(r => r.getAttribute('fill'))"
    )
    before = page.execute_script(colors, lens)
    shade = lens.find_element("css selector", "select")
    assert shade.get_attribute("value") == "probability"
    shade.send_keys("KL")
    assert page.execute_script(colors, lens) != before
    assert "1.5 KL to the last layer (nats)" in lens.text


def test_the_first_screen_has_verdicts_and_one_chart_of_all_methods(page):
    first = page.find_element("css selector", ".first")
    chart = first.find_element("css selector", "figure")
    assert "Quality kept against compute" in chart.text and "Half of the tokens" in first.text
    top = page.execute_script("return arguments[0].getBoundingClientRect().top", chart)
    assert top < 500  # beside the verdicts, without scrolling
    assert "share of full compute (measured time)" in chart.text
    assert len(chart.find_elements("css selector", ".panels .mark")) == 3
    chart.find_element("css selector", "select").send_keys("FLOPs")
    assert "share of full compute (FLOPs)" in chart.text
    footer = page.find_element("tag name", "footer").text
    assert "My CPU, 1 thread, seed 0" in footer and "This page: deepenough" in footer


#: Keeps what a press on a link would save, in the place of saving it.
SAVED = """
window.saved = [];
HTMLAnchorElement.prototype.click = function () { window.saved.push([this.download, this.href]); };
"""


def test_every_figure_is_saved_as_a_picture(page):
    page.execute_script(SAVED)
    figures = all_of(page, "figure")
    for kind in ("svg", "png"):
        for each in figures:
            page.execute_script(
                "arguments[0].click()", each.find_element("class name", f"save-{kind}")
            )
    until = time.monotonic() + 30
    while len(saved := page.execute_script("return window.saved")) < 2 * len(figures):
        assert time.monotonic() < until, f"{len(saved)} of {2 * len(figures)} pictures"
        time.sleep(0.1)
    drawings = [unquote(url.partition(",")[2]) for name, url in saved if name.endswith(".svg")]
    assert len(drawings) == len(figures)
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)  # well formed, and with nothing but shapes and text
        assert root.tag.endswith("svg") and float(root.get("width")) > 200
        assert "var(" not in drawing and "<script" not in drawing and "onclick" not in drawing
        assert sum(1 for _ in root.iter("{http://www.w3.org/2000/svg}text")) > 1
    pictures = [url for name, url in saved if name.endswith(".png")]
    assert len(pictures) == len(figures)
    for url in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert image.width > 400 and len(image.convert("RGB").getcolors(1 << 24) or ()) > 20


def test_written_tokens_are_shaded_by_depth(page):
    tokens = figure(page, "How deep").find_elements("css selector", ".tokens .token")
    prompt, early, late = (token.value_of_css_property("background-color") for token in tokens)
    assert prompt == "rgba(0, 0, 0, 0)"
    assert early == "rgba(85, 92, 111, 1)"  # a third of the way from dark to bright
    assert late == "rgba(254, 232, 56, 1)"  # all layers: the brightest


def test_the_frontier_changes_its_cost_and_hides_groups(page):
    chart = figure(page, "agreement against cost")
    assert len(chart.find_elements("css selector", "svg .mark")) == 3
    select = chart.find_element("css selector", "select")
    select.send_keys("blocks")
    assert "blocks run per token" in chart.find_element("css selector", ".chart").text
    buttons = chart.find_elements("css selector", ".legend button")
    next(b for b in buttons if b.text == "exit").click()
    assert len(chart.find_elements("css selector", ".panels svg .mark")) == 1
    pressed = [
        b.get_attribute("aria-pressed")
        for b in chart.find_elements("css selector", ".legend button")
    ]
    assert pressed == ["true", "false"]


def test_a_point_tells_its_run_and_its_command(page, evil):
    chart = figure(page, "agreement against cost")
    first = chart.find_element("css selector", "svg .mark[tabindex='0']")
    detail = chart.find_element("css selector", ".chosen")
    assert not detail.is_displayed()
    first.send_keys(RIGHT, ENTER)  # from the cheapest to the next
    assert "worse" in detail.text and f"run worse {evil}" in detail.text
    link = detail.find_element("css selector", "a")
    target = page.find_element("css selector", link.get_dom_attribute("href"))
    assert target.text.startswith("Shortcuts")
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click'))", first)
    assert "early" in detail.text


def test_one_tab_leaves_a_chart_and_focus_is_seen(page):
    chart = figure(page, "How much a whole sentence still changes")
    marks = chart.find_elements("css selector", "svg .mark")
    assert len(marks) >= 4
    page.execute_script("arguments[0].focus()", marks[0])
    assert marks[0].value_of_css_property("stroke-width") == "3px"
    tip = page.find_element("css selector", ".tip")
    assert tip.is_displayed() and "step 1" in tip.text
    marks[0].send_keys(RIGHT)
    assert page.switch_to.active_element == marks[1] and "step 2" in tip.text
    marks[1].send_keys(TAB)
    after = page.switch_to.active_element
    assert after.tag_name == "button" and after.text == "Data"


def test_cells_of_a_table_of_colours_are_reached_by_arrows(page):
    heat = figure(page, "How much each token still changes")
    panel = heat.find_element("css selector", ".panels > div")
    cells = panel.find_elements("css selector", "svg .mark")
    assert len(cells) == 4
    page.execute_script("arguments[0].focus()", cells[0])
    cells[0].send_keys(DOWN)
    assert page.switch_to.active_element == cells[2]
    cells[2].send_keys(RIGHT)
    assert page.switch_to.active_element == cells[3]
    cells[3].send_keys(RIGHT)  # there is nothing more
    assert page.switch_to.active_element == cells[3]


def test_data_is_sorted_and_saved(page):
    chart = figure(page, "agreement against cost")
    chart.find_element("css selector", ".show-data").click()

    def names() -> list[str]:
        return [c.text for c in chart.find_elements("css selector", "tbody td:first-child")]

    assert names() == ["all", "early", "worse"]
    quality = chart.find_elements("css selector", "th button")[2]
    assert quality.text == "agreement"
    quality.click()
    assert names() == ["worse", "early", "all"]
    quality.click()
    assert names() == ["all", "early", "worse"]
    saved = chart.find_element("css selector", "a.save")
    name = saved.get_dom_attribute("download")
    assert name == "agreement-against-cost-milliseconds-per-token.csv"
    lines = unquote(saved.get_dom_attribute("href").partition(",")[2]).split("\r\n")
    assert lines[0].startswith("name,group,agreement,") and len(lines) == 4
    assert lines[2].startswith("early,exit,0.94,")


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


#: A store in the place of `localStorage`, kept in the tab's own name. Chromium writes the real one
#: for pages opened from files when it finds the time, so that a reload may or may not see it.
STORE = """
Object.defineProperty(window, "localStorage", { value: {
  getItem: key => JSON.parse(window.name || "{}")[key] ?? null,
  setItem: (key, value) => {
    window.name = JSON.stringify({ ...JSON.parse(window.name || "{}"), [key]: value });
  },
} });
"""


def test_the_theme_switches_and_is_kept(page):
    def ground() -> str:
        return str(page.find_element("tag name", "body").value_of_css_property("background-color"))

    def becomes(expected: Callable[[str], bool]) -> bool:
        until = time.monotonic() + 20
        while not (reached := expected(ground())) and time.monotonic() < until:
            time.sleep(0.05)
        return reached

    script = page.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": STORE})
    try:
        page.refresh()
        before = ground()
        page.find_element("id", "theme").send_keys(ENTER)
        assert becomes(lambda color: color != before)
        page.refresh()
        assert ground() != before  # as it was left
        page.find_element("id", "theme").click()
        assert becomes(lambda color: color == before)
        page.refresh()
        assert ground() == before
    finally:
        page.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


#: Texts of one drawing that lie on one another by more than a hair.
OVERLAPS = """
return [...document.querySelectorAll('.chart svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent);
  const boxes = texts.map(t => t.getBoundingClientRect());
  return texts.flatMap((t, i) => texts.slice(i + 1).filter((_, k) => {
    const a = boxes[i], b = boxes[i + 1 + k];
    return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  }).map(u => `${svg.getAttribute('aria-label')}: ${t.textContent} / ${u.textContent}`));
});
"""


def test_no_label_covers_another(page):
    assert page.execute_script(OVERLAPS) == []


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
        assert page.execute_script(OVERLAPS) == []
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
