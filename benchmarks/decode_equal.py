"""Lossless decoding gives the tokens of `generate` on 200 of 200 prompts.

Nothing is timed, so it needs no quiet machine. All ways decode the prompts in batches. Where a
continuation differs, the first difference is looked at: if the model's two best logits there are
closer than 0.001, rounding decides, and it is counted apart. The draft head is that of
`decode_speed`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.decode_setup import (
    equality,
    greedy,
    load,
    make_prompts,
    make_speculating,
    new_tokens_of,
    padded,
)
from benchmarks.figures import require
from deepenough.decoding.draft_model import DraftModel

QUICK = False
SEEDS = [0]


def measure(
    model: str = "smollm2",
    tuned: str = "runs/tuned",
    prompts: int = 200,
    batch: int = 10,
    new_tokens: int = 128,
    threads: int = 1,
) -> dict[str, Any]:
    """Decode all prompts in every way; return counts of equal continuations and of drafts."""
    head = DraftModel.from_pretrained(
        require(tuned, "the commands at the top of benchmarks/decode_speed.py make it.")
    )
    full, tokenizer = load(model, threads)
    texts = make_prompts(tokenizer, prompts, "valid")
    ways = {
        "generate": full,
        "lookup_and_linear": make_speculating(full, head, ["lookup", "linear"], 2),
        "chosen": make_speculating(full, head),
    }
    options = greedy(full, new_tokens) | {"return_dict_in_generate": True}
    expected: list[list[int]] = []
    found: dict[str, Any] = {}
    for name, generator in ways.items():
        rows: list[list[int]] = []
        counts = {"passes": 0, "drafted": 0, "accepted": 0}
        for start in range(0, len(texts), batch):
            given = padded(texts[start : start + batch])
            output = generator.generate(**given, **options)
            rows += new_tokens_of(output.sequences, given["input_ids"].shape[1], full)
            if name != "generate":
                counts = {key: count + getattr(output, key) for key, count in counts.items()}
        expected = expected or rows
        found[name] = equality(full, texts, expected, rows)
        if name != "generate":
            found[name]["drafted_a_pass"] = counts["drafted"] / counts["passes"]
            found[name]["accepted_a_pass"] = counts["accepted"] / counts["passes"]
        print(name, found[name], flush=True)
    return {**found, "settings": {"prompts": len(texts), "batch": batch}}
