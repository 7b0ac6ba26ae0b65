"""All experiments of "Jump to Conclusions" at the shape of GPT-2 small run in about ten minutes.

What `deepenough shortcut paper` does with 9,000 + 3,000 sentences of WikiText-2: one random
position each; all maps between layers and of the six parts of every block; then r^2 of all pairs,
the ten likeliest tokens and their scores of the five mappings at every layer, and early exit over
22 values of lambda; and all plots. The weights are random: only the time is of interest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from benchmarks.figures import require
from deepenough.cli import PlotConfig, plot
from deepenough.hf.adapter import Adapter
from deepenough.runs import read_records
from deepenough.shortcut.commands import repeat_paper
from deepenough.shortcut.config import SentencesConfig, ShortcutPaperConfig
from deepenough.shortcut.lens import Reference
from deepenough.shortcut.paper import draw_sentences
from deepenough.shortcut.submodules import Replacement

QUICK = False
SEEDS = [0]
#: Given for the paper's scripts on such a machine, not measured here.
PAPER_HOURS = 11.0


def measure(train: int = 9000, test: int = 3000, data: str | None = None) -> dict[str, Any]:
    """Run the command's work and return the seconds of each stage.

    Args:
        train: Sentences to fit on.
        test: Other sentences to measure on.
        data: Folder with `wikitext-2-raw` and `tokenizers/gpt2`; by default $DEEPENOUGH_DATA.
    """
    folder = Path(data or os.environ.get("DEEPENOUGH_DATA", "data"))
    require(folder / "wikitext-2-raw", "set DEEPENOUGH_DATA to a folder that has it.")
    torch.manual_seed(SEEDS[0])
    model = GPT2LMHeadModel(GPT2Config()).eval().requires_grad_(False)
    names = folder / "tokenizers" / "gpt2"
    tokenizer = GPT2Tokenizer(str(names / "vocab.json"), str(names / "merges.txt"))
    inside: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as out:
        config = ShortcutPaperConfig(
            out=out,
            data=str(folder / "wikitext-2-raw"),
            sentences=SentencesConfig(train=train, test=test, seed=SEEDS[0]),
        )
        began = time.perf_counter()
        sentences = draw_sentences(config.data, config.sentences)
        drawn = time.perf_counter() - began
        with watched(inside):
            seconds = {"sentences": drawn} | repeat_paper(config, model, tokenizer, *sentences)
        before = time.perf_counter()
        plot(PlotConfig([out]))
        seconds["plots"] = time.perf_counter() - before
        total = time.perf_counter() - began
        kinds = Counter(record.kind for record in read_records(Path(out) / "metrics.jsonl")[0])
        num_plots = len(list((Path(out) / "plots").glob("*.pdf")))
    return {
        "seconds": seconds,
        "seconds_inside_measure": inside,
        "total_minutes": total / 60,
        "records": dict(kinds),
        "plots": num_plots,
        "settings": {"sentences": [train, test], "paper_hours_as_given": PAPER_HOURS},
    }


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
