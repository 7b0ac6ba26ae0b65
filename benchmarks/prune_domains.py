"""What a pruned model loses on the text that it was fitted on, on other kinds, and on mixed text.

SmolLM2 is pruned to 0.83 of its layers' weights on articles (WikiText-2), on the prose of Python,
on sentences of film reviews (SST-2), and on a mixture of the three, and measured on other text of
each: KL from the full model and perplexity. All are fitted on half of the usual tokens. Whole
layers dropped by influence stand beside it. What is finished stays in the folder of the runs.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.prune_smollm2 import compare, make, stage
from deepenough.data.classification import open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.data.corpus import open_corpus
from deepenough.hf.loading import load
from deepenough.shortcut.commands import passages
from deepenough.shortcut.config import PruneConfig
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
CHARACTERS = 20_000
"""Of each text that is measured on, about 5,000 tokens."""


def measure(
    runs: str = "runs/prune-domains",
    model: str = "smollm2",
    keep: float = 0.83,
    fit_tokens: int = 20_000,
    threads: int = 1,
) -> dict[str, Any]:
    """Prune on every kind of text and return what that is worth on every kind.

    Args:
        runs: Folder of the pruned models and of what is finished.
        model: Name or folder of the model.
        keep: Share of the layers' weights to keep.
        fit_tokens: Tokens to fit maps on.
        threads: Threads of torch.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    full, tokenizer = load(model)
    train, valid = kinds_of_text("train"), kinds_of_text("valid")
    valid = {kind: beginning(texts) for kind, texts in valid.items()}
    rows = zip(*train.values(), strict=False)
    train["mixed"] = list(chain.from_iterable(rows))
    ways = {f"on_{kind}": ("replace", kind) for kind in train} | {
        "influence": ("influence", "mixed")
    }
    folders = {name: Path(runs) / name for name in ways}
    for name, (method, kind) in ways.items():
        config = PruneConfig(keep=keep, budget="weights", fit_tokens=fit_tokens)
        stage(
            folders[name],
            lambda t=train[kind], c=config, m=method, p=folders[name]: make(
                full, tokenizer, t, c, {"method": m}, p
            ),
        )
    found: dict[str, Any] = {}
    for kind, texts in valid.items():
        scores = stage(
            Path(runs) / f"scores-{kind}",
            lambda t=texts: compare(full, folders, tokenizer, t, AutoModelForCausalLM),
        )
        for name, own in scores.items():
            found.setdefault(name, {})[kind] = own
    return {**found, "settings": {"model": model, "keep": keep, "threads": threads}}


def kinds_of_text(split: str) -> dict[str, list[str]]:
    """Return passages of every kind of text."""
    reviews = open_classification("sst2", ClassificationConfig()).splits[split]
    sentences = [example.text for example in reviews if len(example.text.split()) > 7]
    lines = {
        "wikitext": list(open_corpus("wikitext-2-raw").lines(split)),
        "python": list(open_corpus("python").lines(split)),
        "reviews": sentences,
    }
    return {kind: passages(each) for kind, each in lines.items()}


def beginning(texts: list[str]) -> list[str]:
    """Return the first texts of about so many characters."""
    found: list[str] = []
    while texts[len(found) :] and sum(map(len, found)) < CHARACTERS:
        found.append(texts[len(found)])
    return found
