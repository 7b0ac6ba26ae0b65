"""The demo profiles a real model and shows every other method within five minutes.

`deepenough demo` runs in a process of its own and with an empty cache, as `make demo` runs it after
its set-up. Counted are its steps and its time, the sentences in which it says what it found, and
the size of its page; and some of what it found, so that a figure which changes is noticed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import Figure
from deepenough.artifacts import read_json
from deepenough.demo import ships
from deepenough.figure import read_run
from deepenough.ponder.figures import parity_bands
from deepenough.runs import SHIPPED

QUICK = True
SEEDS = [0]


def measure(out: str | None = None, scale: float = 1.0) -> dict[str, Any]:
    """Run the demo into a folder, by default a temporary one, and return what it took and found."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(out or temporary) / "demo"
        words = ["-m", "deepenough", "demo", "--out", str(folder), "--scale", str(scale)]
        own = os.environ | {"XDG_CACHE_HOME": str(Path(temporary) / "cache")}
        pipes: Any = {"capture_output": True, "text": True}
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *words], env=own, check=False, **pipes)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"the demo failed:\n{done.stderr[-2000:]}")
        steps = re.findall(r"^\[(\d+)/(\d+)\] .*\n\$ deepenough", done.stderr, re.MULTILINE)
        assert [int(number) for number, _ in steps] == list(range(1, int(steps[-1][1]) + 1))
        page = Path(done.stdout.rstrip().rpartition("page: ")[2])
        told = done.stdout.partition("What it found:\n")[2]
        found = re.findall("^- (.*)$", told, re.MULTILINE)
        (programs,) = read_run(folder / "programs").of_kind("programs")[-1:]
        bands = [band for band in parity_bands(read_run(folder / "parity")) if not band.beyond]
        shown = [name for name in SHIPPED if ships(name)]
        return {
            "seconds": seconds,
            "steps": len(steps),
            "findings": len(found),
            "trained_models": len(shown),
            "page_kb": page.stat().st_size / 1000,
            "times_generate": times_generate(read_json(folder / "profile" / "profile.json")),
            "parity_accuracy": mean(band.accuracy for band in bands),
            "programs_exact": programs.values["exact"],
            "settings": {"scale": scale, "shown": shown, "found": found},
        }


def times_generate(profile: dict[str, Any]) -> Figure:
    """Return how fast the fastest way is that changes no token, against the model's own."""
    points = {point["mechanism"]: point for point in profile["generation"]}
    plain = points["transformers"]["quality"]
    ways = (points[name] for name in ("full", "speculative") if name in points)
    best = min(
        (way for way in ways if way["quality"] >= plain), key=lambda way: way["relative_time"]
    )
    low, value, high = (
        1 / best[name] for name in ("relative_time_high", "relative_time", "relative_time_low")
    )
    return Figure(value, "x", low, high)
