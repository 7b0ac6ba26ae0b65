"""The explorer in a real browser: Chromium on loopback, where no other name resolves."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'deepenough[explorer]'")

from deepenough.explorer import app, trials
from deepenough.explorer.commands import ExploreConfig
from deepenough.explorer.language_model import LanguageModel, Writing
from deepenough.figure import Axis, FigureSpec, Frame, HeatMap, Inspector, Section
from deepenough.shortcut.modeling import Shortcuts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SIZES = {"desktop": (1200, 900), "phone": (360, 740)}
TABS = ["Write", "Lens", "Classify", "Translate", "Search"]
SENTENCES = ["The capital of France is Paris.", "A dog runs on the beach."] * 4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is not installed: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    switches = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
    switches += ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",)
    for switch in (*switches, "--force-prefers-reduced-motion", "--window-size=1200,900"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def heat(rows: list[str], columns: int, **look: Any) -> HeatMap:
    values = np.linspace(0, 1, len(rows) * columns).reshape(len(rows), columns).tolist()
    names = [str(number + 1) for number in range(columns)]
    scale = Axis("probability", low=0.0, high=1.0)
    return HeatMap(rows, names, values, Axis("pass"), Axis(), scale, **look)


def opened(trial: trials.Trial, _: str) -> Inspector | Section:
    """Stand-ins for finished runs: what their models compute is tested where they are."""
    if trial.method == "par":
        rows = ["attention", "dense", "identity"]
        frames = [Frame(f"step {n}", heat(rows, 6).values) for n in range(5)]
        return Section("s", "About it.", ["It chose."], [figure(heat(rows, 6, frames=frames))])

    def look(text: str, value: float) -> Section:
        return Section(
            "s", findings=[f"{text} at {value:g}"], figures=[figure(heat(["a", "b"], 8))]
        )

    return Inspector(look, "An example.", "Threshold", 0.01, 1.0, 0.5)


def figure(panel: HeatMap) -> FigureSpec:
    return FigureSpec("f", "A figure", "What is seen.", [panel], wide=True)


@pytest.fixture(scope="module")
def writing() -> threading.Event:
    """Set while texts may be written: cleared, the request that has the model keeps it."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture(scope="module")
def address(
    tiny_writer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    writing: threading.Event,
    free_port: Callable[[], int],
) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(trials, "open_trial", opened)
        model = LanguageModel(str(tiny_writer))
        maps = Shortcuts.fit(model.model, model.tokenizer, SENTENCES, targets="last")
        eye = torch.eye(maps.width), torch.zeros(maps.width)
        maps.tuned = dict.fromkeys(range(maps.num_layers), eye)
        model.shortcuts.found = maps
        stream = model.stream

        def held(*asked: Any) -> Iterator[Writing]:
            for written in stream(*asked):
                yield written
                writing.wait(60)

        patch.setattr(model, "stream", held)
        config = ExploreConfig(max_tokens=256, port=free_port())
        page = app.build(model, {}, config)
        yield app.launch(page, config)
        page.close(verbose=False)


def all_of(page: Any, selector: str) -> list[Any]:
    return [each for each in page.find_elements("css selector", selector) if each.is_displayed()]


def one(page: Any, selector: str) -> Any:
    return wait_for(lambda: all_of(page, selector))[0]


def wait_for(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := ask():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def open_tab(page: Any, name: str) -> None:
    tabs = {tab.text: tab for tab in all_of(page, "button[role=tab]")}
    if name not in tabs:  # behind the dots of a narrow screen
        one(page, ".overflow-menu > button").click()
        tabs = {tab.text: tab for tab in all_of(page, ".overflow-dropdown button")}
    tabs[name].click()


def num_tokens(page: Any, place: str = "body") -> int:
    """Count at once: while a text is being written, its tokens are drawn anew."""
    return int(page.execute_script(f"return document.querySelectorAll('{place} .token').length"))


def shades(page: Any, place: str) -> set[str]:
    script = f"return [...document.querySelectorAll('{place} .token')].map(t => t.style.background)"
    return set(page.execute_script(script))


def retype(page: Any, field: Any, text: str) -> None:
    field.send_keys("\ue009", "a")  # control and a: all of it
    field.send_keys("\ue017", text)  # delete, then type


def choose(page: Any, name: str) -> None:
    next(label for label in all_of(page, "label") if label.text == name).click()


@pytest.fixture(params=[(size, theme) for size in SIZES for theme in ("light", "dark")], ids=str)
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page in one size and theme; whatever is done to it, the console stays silent."""
    size, theme = request.param
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(f"{address}?__theme=light")
    one(browser, "#write")
    if theme == "dark":
        one(browser, "#theme").click()
    assert browser.execute_script("return document.body.classList.contains('dark')") is (
        theme == "dark"
    )
    yield browser
    check_layout(browser, width)
    assert browser.get_log("browser") == []
    assert hosts(browser) <= {urlsplit(address).netloc}
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def hosts(browser: Any) -> set[str]:
    """Return the hosts that were asked for anything since the log was last read."""
    messages = (json.loads(each["message"])["message"] for each in browser.get_log("performance"))
    sent = (m["params"]["request"]["url"] for m in messages if m["method"].endswith("WillBeSent"))
    found = {urlsplit(url).netloc for url in sent if not url.startswith(("data:", "blob:"))}
    assert found  # else nothing was checked
    return found


#: Controls and texts that lie on one another by more than a hair, without being inside each other.
OVERLAPS = """
const seen = [...document.querySelectorAll(
  'h1, button, label, textarea, input, figcaption, .caption, .tokens, .chart svg')]
  .filter(e => e.checkVisibility({ opacityProperty: true, visibilityProperty: true })
    && e.getClientRects().length && getComputedStyle(e).position !== 'absolute'
    && !e.closest('.overflow-menu, .toast-wrap, .tip'));
return seen.flatMap((a, i) => seen.slice(i + 1).filter(b => {
  if (a.contains(b) || b.contains(a)) return false;
  const r = a.getBoundingClientRect(), s = b.getBoundingClientRect();
  return Math.min(r.right, s.right) - Math.max(r.left, s.left) > 2
    && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 3;
}).map(b => [a, b].map(e => `${e.tagName} ${e.textContent.slice(0, 30)}`).join(" / ")));
"""


def check_layout(page: Any, width: int) -> None:
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    assert page.execute_script(OVERLAPS) == []


def test_every_control_of_every_tab(page: Any) -> None:
    width = page.execute_script("return innerWidth")
    retype(page, one(page, "textarea"), "The capital of")
    one(page, "#write").click()
    wait_for(lambda: "times the speed" in one(page, "#verdict").text)
    verdict = one(page, "#verdict").text
    assert "Lossless" in verdict and "the same tokens" in verdict and "Early exit at 0.6" in verdict
    for way in ("plain", "lossless", "exit"):
        assert num_tokens(page, f"#pane-{way}") == 64
        assert "tokens a second" in one(page, f"#pane-{way}").text
    before = shades(page, "#pane-plain")
    assert len(before) == 1  # all layers ran
    check_layout(page, width)
    choose(page, "who drafted it")
    wait_for(lambda: shades(page, "#pane-plain") not in (before, set()))
    assert "drafted (1)" in one(page, "#pane-lossless").text
    slider = next(s for s in all_of(page, "input[type=range]") if s.get_attribute("max") == "1")
    slider.click()  # in its middle, between 0.05 and 1
    wait_for(lambda: "Early exit at 0.5" in one(page, "#verdict").text)

    open_tab(page, "Lens")
    retype(page, one(page, "textarea"), "The capital of France")
    one(page, "#look").click()
    wait_for(lambda: all_of(page, "#lens-table svg .mark"))
    check_layout(page, width)
    cell = all_of(page, "#lens-table svg .mark")[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", cell)
    cell.click()
    tip = one(page, ".tip").text
    assert "10. " in tip and "entropy" in tip and "KL" in tip
    page.switch_to.active_element.send_keys("\ue014")  # right: the next cell
    assert one(page, ".tip").text != tip
    for name in ("entropy", "rank of the next token", "loss on the next token"):
        choose(page, name)
        wait_for(lambda: name.split()[0] in one(page, "#lens-table .chart").text)  # noqa: B023
    for mode, said in (("linear", "linear map"), ("tuned", "KL-tuned map")):
        choose(page, mode)
        wait_for(lambda: said in one(page, "#lens-table figcaption").text)  # noqa: B023

    for name, method in (("Classify", "ponder"), ("Translate", "lazy")):
        open_tab(page, name)
        one(page, f"#start-{method}").click()
        wait_for(lambda: "An example. at 0.5" in one(page, f"#shown-{method}").text)  # noqa: B023
        assert all_of(page, f"#shown-{method} svg .mark")
        check_layout(page, width)
    open_tab(page, "Search")
    told = one(page, "#shown-par output")
    assert told.text == "step 4"
    one(page, "#shown-par input[type=range]").send_keys("\ue011")  # home
    assert told.text == "step 0"


def test_a_refusal_is_shown(page: Any) -> None:
    retype(page, one(page, "textarea"), "")
    one(page, "#write").click()
    wait_for(lambda: "empty" in "".join(each.text for each in all_of(page, ".toast-body")))


def test_streaming_while_another_tab_waits_and_cancels(
    browser: Any, address: str, writing: threading.Event
) -> None:
    browser.get(address)
    first = browser.current_window_handle
    one(browser, "#write")
    numbers = all_of(browser, "input[type=number]")
    number = next(each for each in numbers if each.get_attribute("max") == "256")
    retype(browser, number, "256\ue007")
    writing.clear()  # however fast the model is, the first tab has it until the second has waited
    one(browser, "#write").click()
    wait_for(lambda: num_tokens(browser, "#pane-plain"))
    browser.switch_to.new_window("tab")
    try:
        browser.get(address)
        one(browser, "#write").click()
        wait_for(lambda: "queue" in one(browser, "body").text)  # it is told its place
        one(browser, "#stop-writing").click()
        writing.set()
        browser.switch_to.window(first)
        wait_for(lambda: "times the speed" in one(browser, "#verdict").text)
        assert num_tokens(browser) == 3 * 256  # all of it, whatever the other tab did
        writing.clear()
        one(browser, "#write").click()  # and a second one that is stopped on its way
        wait_for(lambda: "waits for its turn" in one(browser, "#pane-exit").text)
        wait_for(lambda: num_tokens(browser, "#pane-plain"))
        one(browser, "#stop-writing").click()
        writing.set()
        time.sleep(1)
        written = num_tokens(browser)
        time.sleep(1)
        assert num_tokens(browser) == written < 3 * 256
        browser.switch_to.window(browser.window_handles[1])
        assert num_tokens(browser) == 0
        one(browser, "#write").click()  # the model is free
        wait_for(lambda: "times the speed" in one(browser, "#verdict").text)
    finally:
        writing.set()
        browser.switch_to.window(browser.window_handles[-1])
        browser.close()
        browser.switch_to.window(first)
