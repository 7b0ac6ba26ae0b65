"""The native backend gives the tokens of `generate` on 500 prompts of 128 new tokens.

Nothing is timed, so it needs no quiet machine. Prompts go one by one, plain and with drafts. Where
a continuation differs, the gap of the model's two best logits at the first difference is kept:
below 1e-4 rounding decides. Finished prompts are kept in a file: a stopped run goes on.
"""

from __future__ import annotations

import json
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
    threads: int = 2,
    kept: str = "runs/decode-identity.jsonl",
) -> dict[str, Any]:
    """Continue all prompts in every way; return counts of equal ones, and the gaps of the others.

    Args:
        model: Name or folder of the model.
        tuned: Folder of a draft head; without one, drafts are looked up in the text.
        prompts: Prompts.
        new_tokens: New tokens a prompt, at most.
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
    texts = make_prompts(tokenizer, prompts, "valid")

    def continued(generator: Any, text: list[int]) -> list[int]:
        output = generator.generate(**padded([text]), **options)
        return new_tokens_of(output, len(text), full)[0]

    for text in texts[len(done) :]:
        expected = continued(full, text)
        gaps = {
            name: _gap(full, text, expected, continued(each, text)) for name, each in ways.items()
        }
        done.append({"tokens": len(expected), "gaps": gaps})
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


@torch.no_grad()
def _gap(model: Any, prompt: list[int], one: list[int], other: list[int]) -> float | None:
    """Return the gap of the two best logits where continuations first differ; None if nowhere."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    best = model(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
