"""Text is encoded at a steady rate, in parallel, and in memory that does not grow with it.

Lines of WikiText-2 (raw) are repeated in random order up to each size. Every measurement is a
process of its own with an empty cache; its time includes opening the text, hashing it, loading the
tokenizer and writing the tokens, and its memory is the sum of what it and its workers have needed
at most, as the system tells (pages that they share count in each). `stream` reads the middle size
as rows of a dataset in streaming mode. What a gigabyte would take is a straight line through the
sizes, extrapolated; `largest_residual_seconds` says how far the measurements are from that line.
The tokenizer is given: training one reads a sample of bounded size.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, require

QUICK = False
SEEDS = [0]
TOKENIZER = "par/wiki2_12k.model"
GIGABYTE = 1000
"""In megabytes, to which times are extrapolated."""
PAUSE = 0.02
"""Seconds between two looks at a process's memory; its peak is remembered by the system."""


def measure(
    megabytes: tuple[int, ...] = (30, 100, 300),
    workers: tuple[int, ...] = (1, 2),
    corpus: str = "wikitext-2-raw",
) -> dict[str, Any]:
    """Prepare texts of each size with each number of workers; return rates, peaks and lines.

    Args:
        megabytes: Sizes of text, in 10^6 bytes.
        workers: Numbers of processes that encode.
        corpus: A folder of $DEEPENOUGH_DATA whose lines are repeated.
    """
    data = Path(os.environ.get("DEEPENOUGH_DATA", "data"))
    require(data / TOKENIZER, f"set DEEPENOUGH_DATA to a folder with {corpus}/ and par/.")
    lines = (data / corpus / "train.txt").read_text("utf-8").splitlines()
    middle = megabytes[len(megabytes) // 2]
    found: dict[str, Any] = {f"workers_{number}": {} for number in workers}
    ids = set()
    with tempfile.TemporaryDirectory() as folder:
        for size in megabytes:
            text = write_text(Path(folder) / f"{size}.txt", lines, size)
            for number in workers:
                run = prepare(text, number, folder)
                ids.add((size, run.pop("checksum")))
                found[f"workers_{number}"][f"size_{size}"] = run
            if size == middle:
                found["stream"] = prepare(as_rows(text), max(workers), folder)
                ids.add((size, found["stream"].pop("checksum")))
            text.unlink()
    if len(ids) != len(megabytes):
        raise AssertionError(f"the ids depend on the number of processes: {ids}")
    for number in workers:
        found[f"workers_{number}"]["gigabyte"] = extrapolated(found[f"workers_{number}"], megabytes)
    first, last = (
        found[f"workers_{n}"][f"size_{megabytes[-1]}"] for n in (workers[0], workers[-1])
    )
    found["times_faster"] = Figure(first["seconds"] / last["seconds"], "x")
    return found | {"settings": {"corpus": corpus, "tokenizer": TOKENIZER, "stream_mb": middle}}


def write_text(path: Path, lines: list[str], megabytes: int) -> Path:
    """Write so much text, lines drawn in an order that is new in every repetition."""
    draw, left = random.Random(SEEDS[0]), megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            draw.shuffle(lines)
            for line in lines:
                left -= file.write(f"{line}\n") + sum(ord(letter) > 127 for letter in line)
                if left <= 0:
                    break
    return path


def as_rows(text: Path) -> Path:
    """Write the lines of a text as rows of a dataset, and return their folder."""
    folder = text.with_suffix("")
    folder.mkdir()
    with text.open(encoding="utf-8") as source, (folder / "train.jsonl").open("w") as file:
        for line in source:
            file.write(json.dumps({"text": line.removesuffix("\n")}) + "\n")
    return folder


def prepare(text: Path, workers: int, folder: str) -> dict[str, Any]:
    """Return seconds, rate and peak memory of preparing a text in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        name = f"hf-stream:{text}" if text.is_dir() else str(text)
        run = fresh(name, cache, str(workers))
    run["mb_per_second"] = Figure(run["num_bytes"] / 1e6 / run["seconds"], "MB/s")
    return run


def fresh(*words: str) -> dict[str, Any]:
    """Return what this file prints in a process of its own, and its peak with its workers'."""
    command = [sys.executable, "-m", "benchmarks.prepare_large", *words]
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peaks |= dict(family_peaks(process.pid))
            time.sleep(PAUSE)
        assert process.stdout is not None
        answer = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{command} failed")
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found | {"peak_mb": sum(peaks.values()) / 1e6, "num_processes": len(peaks)}


def family_peaks(pid: int) -> Iterator[tuple[int, int]]:
    """Yield a process and its children, each with the most bytes that were resident."""
    try:
        place = Path(f"/proc/{pid}")
        for line in (place / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                yield pid, 1024 * int(line.split()[1])
        for child in (place / f"task/{pid}/children").read_text().split():
            yield from family_peaks(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended


def extrapolated(runs: dict[str, Any], megabytes: tuple[int, ...]) -> dict[str, Any]:
    """Return what a gigabyte would take by straight lines through the measurements."""
    sizes = np.array(megabytes, dtype=float)
    seconds = np.array([runs[f"size_{size}"]["seconds"] for size in megabytes])
    peaks = np.array([runs[f"size_{size}"]["peak_mb"] for size in megabytes])
    slope, start = np.polyfit(sizes, seconds, 1)
    growth, _ = np.polyfit(sizes, peaks, 1)
    return {
        "seconds": float(start + slope * GIGABYTE),
        "start_seconds": float(start),
        "largest_residual_seconds": float(np.abs(start + slope * sizes - seconds).max()),
        "mb_of_memory_per_mb_of_text": Figure(float(growth), "x"),
    }


def main(text: str, cache: str, workers: str) -> dict[str, Any]:
    """Prepare a text and return how long that took, and what came of it."""
    from deepenough.artifacts import SEAL, read_json
    from deepenough.data.corpus import open_corpus
    from deepenough.data.tokenizer import load_tokenizer
    from deepenough.data.tokens import IDS_FILE, token_file

    began = time.perf_counter()
    corpus = open_corpus(text, valid_fraction=0, test_fraction=0, cache=cache)
    tokenizer = load_tokenizer(TOKENIZER, lowercase=True)
    options = {"end_of_line": False, "cache_dir": cache, "workers": int(workers)}
    tokens = token_file(corpus, "train", tokenizer, **options)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "num_tokens": len(tokens),
        "num_bytes": tokens.num_bytes,
        "checksum": read_json(tokens.folder / SEAL)["files"][IDS_FILE],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
