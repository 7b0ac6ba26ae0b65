"""Take the pictures of page, explorer and terminal: `python -m docs.pictures [page] [explorer]`.

Nothing in them is drawn: a profile of SmolLM2 is made, its output and its page are photographed in
Chromium, and the explorer is started and used. Needs deepenough[dev], chromium and chromedriver.
"""

from __future__ import annotations

import html
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

from benchmarks.explorer_load import Server

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
WIDTH = 1100
TERMINAL = """<meta charset="utf-8"><style>body { margin: 0; background: #16181d; color: #e6e6e6;
font: 15px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; padding: 18px 22px }
pre { margin: 0; white-space: pre-wrap } b { color: #7fd1b9 }</style><pre>"""


@contextmanager
def browser(height: int) -> Iterator[Any]:
    """Open Chromium, of the width of all pictures."""
    options = webdriver.ChromeOptions()
    switches = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    switches += ("--disable-background-networking", "--disable-component-update")
    options.binary_location = shutil.which("chromium") or ""
    for switch in switches:
        options.add_argument(switch)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    metrics = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield driver
    finally:
        driver.quit()


def photograph(driver: Any) -> Image.Image:
    """Return what the browser shows, in few enough colours to be small."""
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return picture.quantize(200, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


def save(name: str, frames: list[tuple[Image.Image, int]]) -> None:
    """Write a PNG of one frame, or a GIF of several, each with its milliseconds."""
    path, pictures = IMAGES / name, [frame for frame, _ in frames]
    if len(frames) == 1:
        pictures[0].save(path, optimize=True)
    else:
        times = [milliseconds for _, milliseconds in frames]
        pictures[0].save(
            path, save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=True
        )
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")


def wait_for(driver: Any, script: str, each: Callable[[], None], seconds: float = 900) -> None:
    """Call `each` until a script of the page returns true."""
    until = time.monotonic() + seconds
    while not driver.execute_script(f"return {script}"):
        if time.monotonic() > until:
            raise SystemExit(f"it did not happen: {script}")
        each()


def page() -> None:
    """Profile SmolLM2: its output as it came (terminal.gif), and its page (page.png)."""
    with tempfile.TemporaryDirectory() as folder, browser(560) as driver:
        words = ["profile", "smollm2", "--out", "runs/profile"]
        shown, frames = f"<b>$</b> deepenough {' '.join(words)}\n", []

        def show(milliseconds: int) -> None:
            (Path(folder) / "terminal.html").write_text(TERMINAL + shown, "utf-8")
            driver.get(f"file://{folder}/terminal.html")
            driver.execute_script("scrollTo(0, document.body.scrollHeight)")
            frames.append((photograph(driver), milliseconds))

        show(900)
        command = [sys.executable, "-m", "deepenough", *words]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=folder, **pipes) as process:
            assert process.stdout is not None
            for line in process.stdout:
                shown += html.escape(line)
                if line.startswith(("[", "- ")):  # a stage, or a verdict
                    show(1200)
            show(6000)
        if process.returncode:
            raise SystemExit(html.unescape(shown))
        save("terminal.gif", frames)
        driver.get(f"file://{folder}/runs/profile/report.html")
        metrics = {"width": WIDTH, "height": 980, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        time.sleep(1)
        save("page.png", [(photograph(driver), 0)])


def explorer() -> None:
    """Write and look with the explorer, once its shortcuts are there (explorer.gif)."""
    frames: list[tuple[Image.Image, int]] = []
    with Server("smollm2") as server, browser(760) as driver:
        driver.get(f"{server.address}?__theme=light")
        status = "document.querySelector('#status')"
        wait_for(driver, f"{status} && !{status}.innerText.trim()", lambda: time.sleep(1))
        before, driven = time.monotonic(), "document.querySelector('#verdict').innerText"

        def frame() -> None:
            nonlocal before
            picture, now = photograph(driver), time.monotonic()
            frames.append((picture, max(80, int(1000 * (now - before)))))
            before = now
            time.sleep(0.3)

        frame()
        driver.find_element("css selector", "#write").click()
        wait_for(driver, f"{driven}.includes('times the speed')", frame, 120)
        frames.append((photograph(driver), 4000))
        next(
            t for t in driver.find_elements("css selector", "[role=tab]") if t.text == "Lens"
        ).click()
        next(t for t in driver.find_elements("css selector", "label") if t.text == "linear").click()
        cells = "document.querySelectorAll('#lens-table svg .mark')"
        wait_for(driver, f"{cells}.length", lambda: time.sleep(0.3), 120)
        time.sleep(1)
        frames.append((photograph(driver), 2500))
        cell = driver.execute_script(f"const all = {cells}; return all[Math.floor(all.length / 3)]")
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
        cell.click()
        time.sleep(0.5)
        frames.append((photograph(driver), 5000))
    save("explorer.gif", frames)


if __name__ == "__main__":
    for take in [page, explorer]:
        if take.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            take()
