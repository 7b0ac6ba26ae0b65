"""The whole of "Jump to Conclusions" at the shape of GPT-2 small, from text to layers saved.

    python benchmarks/shortcut_paper.py [--train 9000 --test 3000] [--save]

Collect the states of 9,000 sentences of WikiText-2 at one random position each; fit all maps,
linear and affine, and those of the parts inside the blocks; then, on 3,000 other sentences, r^2 of
all pairs, precision, surprisal and KL of every mode at every layer, parts replaced from every layer
on, and early exit over 35 thresholds. The weights are random: only the time is of interest.
"""

from __future__ import annotations

import argparse
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
from record import save_result
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.evaluation import evaluate
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.scores import Reference
from deepenough.shortcut.submodules import Replacement, Submodules
from deepenough.training.trainer import keep_freed_memory

# Given for the source's scripts on the machine of the claim, not measured here.
SOURCE_HOURS = 11.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("DEEPENOUGH_DATA"))
    parser.add_argument("--train", type=int, default=9000)
    parser.add_argument("--test", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()
    if arguments.data is None:
        parser.error("give --data, or set DEEPENOUGH_DATA to a folder with wikitext-2-raw")

    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    names = arguments.data / "tokenizers" / "gpt2"
    tokenizer = GPT2Tokenizer(str(names / "vocab.json"), str(names / "merges.txt"))
    text = arguments.data / "wikitext-2-raw"
    train = sentences(text / "train.txt", arguments.train, arguments.seed)
    test = sentences(text / "valid.txt", arguments.test, arguments.seed)

    stages: dict[str, float] = {}
    adapter = adapt(model)
    with timed(stages, "fit layers, linear"):
        linear = Shortcuts.fit(adapter, tokenizer, train, "random", batch_tokens=1024)
    with timed(stages, "fit layers, affine"):
        affine = Shortcuts.fit(adapter, tokenizer, train, "random", affine=True, batch_tokens=1024)
    with timed(stages, "fit parts"):
        submodules = Submodules.fit(adapter, tokenizer, train, batch_tokens=1024)
    inside: dict[str, float] = {}
    with watched(inside), timed(stages, "evaluate"):
        evaluation = evaluate(adapter, tokenizer, [linear, affine], test, submodules=submodules)
    with timed(stages, "early exit"):
        records = evaluation.records()
    result = {
        "sentences": [len(train), len(test)],
        "positions": [linear.meta["fit"]["positions"], evaluation.positions],
        "records": dict(Counter(record.kind for record in records)),
        "seconds": {name: round(seconds, 1) for name, seconds in stages.items()},
        "seconds_inside_evaluate": {name: round(seconds, 1) for name, seconds in inside.items()},
        "total_minutes": round(sum(stages.values()) / 60, 2),
        "source_hours_as_given": SOURCE_HOURS,
    }
    save_result("shortcut_paper", result, arguments.save)


def sentences(path: Path, num: int, seed: int) -> list[str]:
    """Sentences of at least four words, drawn at random from an article's paragraphs."""
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
    began, processor = time.perf_counter(), time.process_time()
    yield
    stages[name] = time.perf_counter() - began
    processor = time.process_time() - processor
    print(f"{name}: {stages[name]:.1f} s, of the processor {processor:.1f} s", flush=True)


@contextmanager
def watched(seconds: dict[str, float]) -> Iterator[None]:
    """Within, add up what the parts of an evaluation take."""
    places: list[tuple[Any, str, Callable[..., str]]] = [
        (Replacement, "last_state", lambda _, kind, *__: f"{kind} replaced"),
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


if __name__ == "__main__":
    main()
