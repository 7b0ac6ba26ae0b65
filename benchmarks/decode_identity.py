"""The native backend gives the tokens of `generate` on 500 prompts of 128 new tokens.

Nothing is timed, so it needs no quiet machine. Prompts go through the native backend one by one,
plain and with drafts, and through `generate` as batches of prompts of equal length, without
padding. Where a continuation differs, `generate` continues that prompt alone, and what differs
still is kept with the gap of the model's two best logits at the first difference: below 1e-4
rounding decides. Finished prompts are kept in a file: a stopped run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_setup import greedy, load, make_prompts, new_tokens_of, padded
from deepenough.decoding.api import speculate
from deepenough.decoding.draft_model import DraftModel

QUICK = False
SEEDS = [0]
TIE = 1e-4


def measure(
    model: str = "smollm2",
    tuned: str = "",
    prompts: int = 500,
    new_tokens: int = 128,
    batch_size: int = 16,
    threads: int = 2,
    kept: str = "runs/decode-identity.jsonl",
) -> dict[str, Any]:
    """Continue all prompts in every way; return counts of equal ones, and the gaps of the others.

    Args:
        model: Name or folder of the model.
        tuned: Folder of a draft head; without one, drafts are looked up in the text.
        prompts: Prompts.
        new_tokens: New tokens a prompt, at most.
        batch_size: Prompts that `generate` continues at once.
        threads: Threads.
        kept: File of finished prompts, of one set of options.
    """
    full, tokenizer = load(model, threads)
    head = {"draft_model": DraftModel.from_pretrained(tuned)} if tuned else {}
    ways = {
        "plain": speculate(full, "none", backend="native"),
        "drafts": speculate(full, backend="native", **head),
    }
    options, path = greedy(full, new_tokens), Path(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def continued(generator: Any, rows: list[list[int]]) -> list[list[int]]:
        output = generator.generate(**padded(rows), **options)
        return new_tokens_of(output, len(rows[0]), full)

    for batch in _of_equal_length(make_prompts(tokenizer, prompts, "valid"), batch_size, len(done)):
        for text, together in zip(batch, continued(full, batch), strict=True):
            gaps: dict[str, float | None] = {}
            for name, way in ways.items():
                gaps[name], own = None, continued(way, [text])[0]
                if own != together:
                    gaps[name] = _gap(full, text, continued(full, [text])[0], own)
            done.append({"tokens": len(together), "gaps": gaps})
            with path.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    found: dict[str, Any] = {}
    for name in ways:
        gaps = [each["gaps"][name] for each in done if each["gaps"][name] is not None]
        ties = sum(gap < TIE for gap in gaps)
        counts = {"identical": len(done) - len(gaps), "ties": ties, "different": len(gaps) - ties}
        found[name] = counts | {"largest_gap": max(gaps, default=0.0)}
    tokens = sum(each["tokens"] for each in done)
    return {**found, "settings": {"prompts": len(done), "tokens": tokens, "tuned": tuned}}


def _of_equal_length(
    prompts: list[list[int]], batch_size: int, done: int
) -> Iterator[list[list[int]]]:
    """Yield the prompts after the first `done`, ordered by length, in batches of one length."""
    ordered = sorted(prompts, key=len)[done:]
    for _, same in groupby(ordered, key=len):
        rows = list(same)
        yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


@torch.no_grad()
def _gap(model: Any, prompt: list[int], one: list[int], other: list[int]) -> float | None:
    """Return the gap of the two best logits where continuations first differ; None if nowhere."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    best = model(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
