"""In bfloat16, decoding differs from `generate` only where rounding decides between two tokens.

Nothing is timed. At the first difference of a continuation the model reads the common text in one
pass: the gap between the logits of the two tokens there is counted in steps of bfloat16 at the
best logit's size. One or two steps are a tie: the same sums in another order give either token.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.decode_setup import greedy, make_prompts
from deepenough.decoding.api import speculate
from deepenough.hf import loading

QUICK = True
SEEDS = [0]
#: Steps of bfloat16 that two sums of the same numbers in another order may lie apart.
TIE_STEPS = 2


def measure(
    model: str = "smollm2", prompts: int = 30, new_tokens: int = 32, threads: int = 1
) -> dict[str, Any]:
    """Continue prompts in every way; return counts of equal continuations, ties and the gaps."""
    torch.set_num_threads(threads)
    full, tokenizer = loading.load(model, dtype="bfloat16")
    precise, _ = loading.load(model)
    texts = make_prompts(tokenizer, prompts)
    ways = {
        "no_drafts": speculate(full, "none"),
        "lookup": speculate(full, "lookup"),
        "float32": precise,  # the same weights: how far bfloat16 is from itself unrounded
    }
    options = greedy(full, new_tokens)
    expected = [_continued(full, text, options) for text in texts]
    found: dict[str, Any] = {}
    for name, generator in ways.items():
        steps: list[float] = []
        for text, one in zip(texts, expected, strict=True):
            other = _continued(generator, text, options)
            if one != other:
                steps.append(_gap(full, text, one, other))
        ties = sum(gap <= TIE_STEPS for gap in steps)
        counts = {"identical": len(texts) - len(steps), "ties": ties}
        found[name] = counts | {
            "different": len(steps) - ties,
            "largest_gap": max(steps, default=0.0),
        }
        print(name, found[name], flush=True)
    return {**found, "settings": {"prompts": len(texts), "new_tokens": new_tokens}}


def _continued(model: Any, prompt: list[int], options: dict[str, Any]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@torch.no_grad()
def _gap(model: Any, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Return how far apart the logits of the first two different tokens are, in steps."""
    pairs = zip(one, other, strict=False)
    place = next(number for number, (a, b) in enumerate(pairs) if a != b)
    logits = model(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1].float()
    step = 2.0 ** (math.floor(math.log2(float(logits.max().abs()))) - 7)
    return abs(float(logits[one[place]] - logits[other[place]])) / step
