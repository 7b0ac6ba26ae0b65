"""All experiments of "Jump to Conclusions" at the shape of GPT-2 small run in about ten minutes.

Collect the states of 9,000 sentences of WikiText-2 at one random position each; fit all maps,
linear and affine, and those of the parts inside the blocks; then, on 3,000 other sentences, r^2 of
all pairs, precision, surprisal and KL of every mode at every layer, parts replaced from every layer
on, and early exit over 35 thresholds. The weights are random: only the time is of interest.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from benchmarks.figures import require
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.evaluation import evaluate
from deepenough.shortcut.lens import Reference
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.submodules import Replacement, Submodules
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
#: Given for the paper's scripts on such a machine, not measured here.
PAPER_HOURS = 11.0


def measure(train: int = 9000, test: int = 3000, data: str | None = None) -> dict[str, Any]:
    """Fit and measure everything the paper does; return the seconds of each stage.

    Args:
        train: Sentences to fit on.
        test: Other sentences to measure on.
        data: Folder with `wikitext-2-raw` and `tokenizers/gpt2`; by default $DEEPENOUGH_DATA.
    """
    keep_freed_memory()
    folder = Path(data or os.environ.get("DEEPENOUGH_DATA", "data"))
    require(folder / "wikitext-2-raw", "set DEEPENOUGH_DATA to a folder that has it.")
    torch.manual_seed(SEEDS[0])
    adapter = adapt(GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False))
    names = folder / "tokenizers" / "gpt2"
    tokenizer = GPT2Tokenizer(str(names / "vocab.json"), str(names / "merges.txt"))
    text = folder / "wikitext-2-raw"
    fitted = sentences(text / "train.txt", train, SEEDS[0])
    tested = sentences(text / "valid.txt", test, SEEDS[0])

    stages: dict[str, float] = {}
    options: dict[str, Any] = {"positions": "random", "seed": SEEDS[0]}
    with timed(stages, "fit"):
        linear = Shortcuts.fit(adapter, tokenizer, fitted, **options)
        affine = Shortcuts.fit(adapter, tokenizer, fitted, affine=True, **options)
        submodules = Submodules.fit(adapter.model, tokenizer, fitted, **options)
    inside: dict[str, float] = {}
    with watched(inside), timed(stages, "evaluate"):
        evaluation = evaluate(adapter, tokenizer, [linear, affine], tested, submodules=submodules)
    with timed(stages, "early_exit"):
        records = evaluation.records()
    return {
        "seconds": stages,
        "seconds_inside_evaluate": inside,
        "total_minutes": sum(stages.values()) / 60,
        "records": dict(Counter(record.kind for record in records)),
        "settings": {"sentences": [train, test], "paper_hours_as_given": PAPER_HOURS},
    }


def sentences(path: Path, num: int, seed: int) -> list[str]:
    """Return sentences of at least four words, drawn at random from the paragraphs of a file."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [
        sentence
        for line in lines
        if line and not line.startswith("=")
        for sentence in re.split(r'(?<=[.!?])\s+(?=[A-Z"])', line)
        if sentence.count(" ") >= 3
    ]
    if len(found) < num:
        raise SystemExit(f"{path} has {len(found)} sentences, not {num}")
    return random.Random(seed).sample(found, num)


@contextmanager
def timed(stages: dict[str, float], name: str) -> Iterator[None]:
    """Keep the seconds of a stage."""
    began, processor = time.perf_counter(), time.process_time()
    yield
    stages[name] = time.perf_counter() - began
    processor = time.process_time() - processor
    print(f"{name}: {stages[name]:.1f} s, of the processor {processor:.1f} s", flush=True)


@contextmanager
def watched(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of the parts of an evaluation while it runs."""
    places: list[tuple[Any, str, Callable[..., str]]] = [
        (Replacement, "last_state", lambda _, kind, *__: f"{kind}_replaced"),
        (Adapter, "logits", lambda *_: "head"),
        (Reference, "score", lambda *_: "scores"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, label in places:
        setattr(owner, name, _watch(getattr(owner, name), label, seconds))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def _watch(
    function: Callable[..., Any], label: Callable[..., str], seconds: dict[str, float]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        name = label(*args, **kwargs)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
        return result

    return run
