"""How long preparing text takes: tokenising and caching the training split of WikiText-2.

The bar is 15 seconds with an empty cache on two cores; the time includes opening the corpus,
hashing it, loading the tokenizer, encoding, and writing the tokens. Reading it again from the
filled cache is timed beside it.

    DEEPENOUGH_DATA=... python benchmarks/prepare_text.py [--repeats 3] [--save]

Prints JSON; with `--save` also writes it, with machine, date and command, to
benchmarks/results/prepare_text.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

from record import save_result

from deepenough.data.corpus import open_corpus
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import TokenFile, token_file

BAR_SECONDS = 15.0


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    result = measure(arguments.corpus, arguments.tokenizer, arguments.repeats)
    save_result("prepare_text", result, arguments.save)
    return 0 if result["within_bar"] else 1


def measure(corpus: str, tokenizer: str, repeats: int) -> dict[str, Any]:
    """The best of `repeats` runs, each with an empty cache and then with the one it left."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:

            def prepare_train(cache: str = cache) -> TokenFile:
                given = load_tokenizer(tokenizer, lowercase=True)
                text = open_corpus(corpus, cache=cache)
                return token_file(text, "train", given, end_of_line=False, cache_dir=cache)

            seconds, tokens = _timed(prepare_train)
            cold.append(seconds)
            warm.append(_timed(prepare_train)[0])
            counts = {"tokens": len(tokens), "bytes": tokens.num_bytes}
    return {
        "corpus": corpus,
        "tokenizer": tokenizer,
        **counts,
        "seconds": round(min(cold), 3),
        "seconds_of_each": [round(seconds, 3) for seconds in cold],
        "seconds_from_cache": round(min(warm), 3),
        "tokens_per_second": round(counts["tokens"] / min(cold)),
        "bar_seconds": BAR_SECONDS,
        "within_bar": min(cold) < BAR_SECONDS,
    }


def _timed(call: Callable[[], TokenFile]) -> tuple[float, TokenFile]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", default="wikitext-2")
    parser.add_argument("--tokenizer", default="par/wiki2_12k.model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
