"""Tokenising and caching the training split of WikiText-2 takes about a second.

Every round starts with an empty cache. The time includes opening the corpus, hashing it, loading
the tokenizer, encoding, and writing the tokens; reading it again from the cache is timed beside it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import interleaved, require
from deepenough.data.corpus import open_corpus
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import TokenFile, token_file

QUICK = True
SEEDS: list[int] = []


def measure(
    rounds: int = 3, corpus: str = "wikitext-2", tokenizer: str = "par/wiki2_12k.model"
) -> dict[str, Any]:
    """Time an empty and then a filled cache; return seconds and sizes."""
    data = Path(os.environ.get("DEEPENOUGH_DATA", "data"))
    require(data / tokenizer, "set DEEPENOUGH_DATA to a folder with wikitext-2/ and par/.")
    with tempfile.TemporaryDirectory() as folder:
        used = 0

        def prepare(fresh: bool) -> TokenFile:
            nonlocal used
            used += fresh
            cache = str(Path(folder) / str(used))
            given = load_tokenizer(tokenizer, lowercase=True)
            text = open_corpus(corpus, cache=cache)
            return token_file(text, "train", given, end_of_line=False, cache_dir=cache)

        functions = {"empty": lambda: prepare(True), "cached": lambda: prepare(False)}
        timings = interleaved(functions, rounds, warmup=0)
        tokens = timings.results["cached"][0]
        sizes = {"num_tokens": len(tokens), "num_bytes": tokens.num_bytes}
    return {
        **sizes,
        "seconds": timings.best("empty"),
        "seconds_from_cache": timings.best("cached"),
        "tokens_per_second": timings.rate("empty", sizes["num_tokens"], "tokens/s"),
        "settings": {"corpus": corpus, "tokenizer": tokenizer, "rounds": rounds},
    }
