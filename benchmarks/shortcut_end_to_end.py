"""Fitting all maps of SmolLM2-135M takes two to three times as long as bare forward passes.

The text is WikiText-2. Bare passes run the model as it comes, head included, without a cache; those
of the layers alone, which is what a fit runs, are timed beside them. A fit is all that
`Shortcuts.fit` does, from text to maps. All take turns.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from benchmarks.figures import interleaved
from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.loading import load
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import TokenBatch, batches, make_reading

QUICK = False
SEEDS: list[int] = []


def measure(
    model: str = "smollm2",
    corpus: str = "wikitext-2-raw",
    tokens: int = 40_000,
    rounds: int = 2,
    threads: int = 2,
) -> dict[str, Any]:
    """Time bare passes and fits over the same text; return seconds and ratios."""
    torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    adapter = adapt(loaded)
    texts = choose_texts(corpus, tokenizer, tokens)
    read = list(batches(tokenizer, texts, make_reading(adapter)))
    timings = interleaved(
        {
            "forward": lambda: run(adapter, read, head=True),
            "layers": lambda: run(adapter, read, head=False),
            "last": lambda: Shortcuts.fit(adapter, tokenizer, texts, targets="last"),
            "all": lambda: Shortcuts.fit(adapter, tokenizer, texts),
        },
        rounds,
        warmup=0,
    )
    fits = {name: timings.results[name][0] for name in ("last", "all")}
    return {
        "tokens": fits["all"].meta["fit"]["positions"],
        "pairs": {name: len(fit.pairs) for name, fit in fits.items()},
        "seconds": {name: timings.best(name) for name in timings.seconds},
        "of_bare_forward_passes": {name: timings.ratio(name, "forward") for name in fits},
        "of_passes_without_head": {name: timings.ratio(name, "layers") for name in fits},
        "settings": {"model": model, "corpus": corpus, "rounds": rounds},
    }


def choose_texts(corpus: str, tokenizer: Any, tokens: int) -> list[str]:
    """Return paragraphs of the training text with as many tokens as asked for."""
    texts: list[str] = []
    paragraphs = (line for line in open_corpus(corpus).lines("train") if line.strip())
    while tokens > 0 and (some := list(islice(paragraphs, 8))):
        for text, ids in zip(some, tokenizer(some)["input_ids"], strict=True):
            if tokens > 0 and len(ids) > 1:
                texts.append(text)
                tokens -= len(ids)
    return texts


@torch.no_grad()
def run(adapter: Adapter, read: list[TokenBatch], head: bool) -> None:
    """Run the model, or only its layers, over all batches."""
    part = adapter.model if head else adapter.trunk
    for batch in read:
        part(input_ids=batch.ids, use_cache=False)
