"""Early exit in a batch of 8 beside plain batches of 8, and rows beside one by one.

    python benchmarks/exit_batch.py --model smollm2 --shortcuts runs/shortcut/shortcuts [--save]

For each threshold: tokens a second of transformers' `generate`, our full loop and the exiting model
with each fill, all over the same batches and taking turns; the share of its words that the full
model would have said at that place; and whether every row is what it is alone. Where a row is not,
the first difference is looked at: if the two best logits there are closer than 0.001, rounding
decides between them, and it is counted apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from exit_prompts import (
    add_arguments,
    agreement,
    end_tokens,
    interleaved,
    load,
    make_exiting,
    make_prompts,
    new_tokens_of,
    options_of,
    padded,
)
from record import save_result

from deepenough.decoding.api import speculate

TIE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.4])
    parser.add_argument("--fills", nargs="+", default=["shortcut", "copy", "deferred"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model, tokenizer, shortcuts = load(arguments)
    prompts = make_prompts(tokenizer, arguments, arguments.batch * arguments.batches)
    batches = [
        prompts[start : start + arguments.batch]
        for start in range(0, len(prompts), arguments.batch)
    ]
    options, ends = options_of(model, arguments.new_tokens), end_tokens(model)
    exiting = {
        f"{fill}_{threshold:g}": make_exiting(model, shortcuts, arguments, threshold, fill)
        for threshold in arguments.thresholds
        for fill in arguments.fills
    }

    def run(generator: Any, some: Sequence[list[int]]) -> list[list[int]]:
        given = padded(some)
        output = generator.generate(**given, **options)
        return new_tokens_of(output, given["input_ids"].shape[1], ends)

    def way(generator: Any) -> Any:
        return lambda some: sum(map(len, run(generator, some)))

    models = {"generate": model, "loop": speculate(model, "none"), **exiting}
    rates = interleaved(
        {name: way(each) for name, each in models.items()}, batches, arguments.rounds
    )
    ways: dict[str, Any] = {}
    for name, rate in rates.items():
        ways[name] = {
            "tokens_per_second": rate,
            "times_generate": rate / rates["generate"],
            "times_loop": rate / rates["loop"],
        }
        if name in exiting:
            ways[name] |= quality(exiting[name], batches, run)
    result = {
        "model": arguments.model,
        "batch": arguments.batch,
        "prompts": len(prompts),
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "exits": arguments.exits,
        "policy": arguments.policy,
        "shortlist": arguments.shortlist,
        "ways": ways,
    }
    save_result(f"exit_batch_{Path(arguments.model).name.lower()}", result, arguments.save)


def quality(fast: Any, batches: Sequence[list[list[int]]], run: Any) -> dict[str, Any]:
    """Agreement with the full model, layers, and rows beside one by one."""
    counts = {"identical": 0, "ties": 0, "different": 0}
    rows: list[list[int]] = []
    depths: list[int] = []
    for some in batches:
        together = run(fast, some)
        depth = fast.trace.depth
        depths += depth[depth > 0].tolist()
        rows += together
        for prompt, row in zip(some, together, strict=True):
            counts[compare(fast, prompt, row, run(fast, [prompt])[0])] += 1
    prompts = [prompt for some in batches for prompt in some]
    return {
        "agreement": agreement(fast.decoding_engine, prompts, rows),
        "layers": sum(depths) / len(depths),
        "rows_beside_one_by_one": counts,
    }


def compare(fast: Any, prompt: list[int], row: list[int], alone: list[int]) -> str:
    if row == alone:
        return "identical"
    pairs = enumerate(zip(row, alone, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(row), len(alone)))
    options = options_of(fast, place + 1) | {"output_logits": True}
    given = padded([prompt])
    output = fast.generate(**given, **options, return_dict_in_generate=True)
    best = output.logits[-1][0].topk(2).values
    return "ties" if float(best[0] - best[1]) < TIE else "different"


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
