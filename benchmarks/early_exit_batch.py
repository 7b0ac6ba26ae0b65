"""Early exit in batches of eight gives every row what it gets alone, and hardly any speed.

For each threshold and way to fill the cache of skipped layers: tokens a second beside transformers'
`generate` and our loop over the same batches, all in turns; the share of tokens that the full model
would have chosen at their place; and whether every row is what it is alone. Maps come from
`python -m benchmarks shortcut_real`.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decode_setup import (
    agreement,
    equality,
    load,
    load_maps,
    make_exiting,
    make_loop,
    make_prompts,
    write_rows,
)
from benchmarks.figures import interleaved
from deepenough.decoding.early_exit import KVPropagation

QUICK = False
SEEDS = [0]
VARIANTS = {
    "higher": {"thresholds": (0.9, 0.8), "fills": ("shortcut", "deferred"), "exits": (21,)},
    "lower": {"thresholds": (0.4, 0.6), "fills": ("shortcut",), "exits": (13,)},
}
"""Exits after the layers that save most at the first threshold of each."""


def measure(
    thresholds: tuple[float, ...] = (0.9, 0.8),
    fills: tuple[KVPropagation, ...] = ("shortcut",),
    exits: tuple[int, ...] = (21,),
    model: str = "smollm2",
    shortcuts: str = "runs/shortcut-real/shortcuts",
    batch: int = 8,
    batches: int = 2,
    new_tokens: int = 48,
    rounds: int = 5,
    threads: int = 2,
) -> dict[str, Any]:
    """Time all ways over batches in turns; return rates, agreement, layers and equal rows."""
    full, tokenizer = load(model, threads)
    maps = load_maps(shortcuts)
    prompts = make_prompts(tokenizer, batch * batches)
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    exiting = {
        f"{fill}_{threshold:g}": make_exiting(full, maps, threshold, fill, exits)
        for threshold in thresholds
        for fill in fills
    }

    def way(generator: Any) -> Any:
        return lambda some: write_rows(generator, some, full, new_tokens)

    models = {"generate": full, "loop": make_loop(full), **exiting}
    timings = interleaved({name: way(each) for name, each in models.items()}, rounds, groups)
    found: dict[str, Any] = {}
    for name, results in timings.results.items():
        rows = [row for group in results for row in group]
        found[name] = {
            "tokens_per_second": timings.rate(name, sum(map(len, rows)), "tokens/s"),
            "times_generate": timings.ratio("generate", name),
            "times_loop": timings.ratio("loop", name),
        }
        if name in exiting:
            fast = exiting[name]
            found[name] |= {
                "agreement": agreement(fast.decoding_engine, prompts, rows),
                "layers": mean_layers(fast, groups, full, new_tokens),
                **rows_alone(fast, prompts, rows, full, new_tokens),
            }
    return {**found, "settings": {"exits": list(exits), "policy": "gap", "rounds": rounds}}


@torch.inference_mode()
def mean_layers(fast: Any, groups: list[list[list[int]]], full: Any, new_tokens: int) -> float:
    """Return the mean number of layers a written token took."""
    depths: list[int] = []
    for some in groups:
        write_rows(fast, some, full, new_tokens)
        depth = fast.trace.depth
        depths += depth[depth > 0].tolist()
    return sum(depths) / len(depths)


@torch.inference_mode()
def rows_alone(
    fast: Any, prompts: list[list[int]], rows: list[list[int]], full: Any, new_tokens: int
) -> dict[str, int]:
    """Count the rows of batches that are what the exiting model writes for them alone."""
    alone = [write_rows(fast, [prompt], full, new_tokens)[0] for prompt in prompts]
    counts = equality(full, prompts, alone, rows)
    return {f"rows_{name}": count for name, count in counts.items()}
