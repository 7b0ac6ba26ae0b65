"""A whole fit for SmolLM2-135M, beside the bare forward passes over the same batches.

    DEEPENOUGH_DATA=... python benchmarks/shortcut_end_to_end.py [--tokens 40000] [--save]

The text is WikiText-2. Bare passes run the model as it comes, head included, without a cache; those
of the layers alone, which is what a fit runs, are timed beside them. A fit is all that
`Shortcuts.fit` does, from text to maps. All take turns, best of several rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from record import save_result

from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.loading import load
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import TokenBatch, batches, make_reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--corpus", default="wikitext-2-raw")
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model)
    adapter = adapt(model)
    texts = choose_texts(arguments.corpus, tokenizer, arguments.tokens)
    read = list(batches(tokenizer, texts, make_reading(adapter)))

    best: dict[str, float] = {}
    for _ in range(arguments.rounds):
        _time(best, "forward", lambda: run(adapter, read, head=True))
        _time(best, "layers", lambda: run(adapter, read, head=False))
        last = _time(best, "last", lambda: Shortcuts.fit(adapter, tokenizer, texts, targets="last"))
        every = _time(best, "all", lambda: Shortcuts.fit(adapter, tokenizer, texts))
    result = {
        "model": arguments.model,
        "tokens": every.meta["fit"]["positions"],
        "pairs": {"last": len(last.pairs), "all": len(every.pairs)},
        "seconds": best,
        "of_bare_forward_passes": {name: best[name] / best["forward"] for name in ("last", "all")},
        "of_passes_without_head": {name: best[name] / best["layers"] for name in ("last", "all")},
    }
    save_result("shortcut_end_to_end", result, arguments.save)


def choose_texts(corpus: str, tokenizer: Any, tokens: int) -> list[str]:
    """Paragraphs of the training text, until there are as many tokens as asked for."""
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
    part = adapter.model if head else adapter.trunk
    for batch in read:
        part(input_ids=batch.ids, use_cache=False)


def _time(best: dict[str, float], name: str, function: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = function()
    best[name] = min(best.get(name, float("inf")), time.perf_counter() - started)
    return result


if __name__ == "__main__":
    main()
