"""What the cache of skipped layers holds decides how often early exit errs.

At each threshold, with the same exits, the exiting model continues prompts by 128 tokens with each
way to fill the cache of skipped layers. Told apart:

- `agreement`: of the tokens it wrote, the share that the full model would have chosen there;
- `on_full_text`: of the full model's own text, the share of tokens that the exits confirm, so that
  all ways are measured at the same places;
- `same_place` and `first_difference`: how far the texts are those of the full model.

Maps come from `python -m benchmarks shortcut_real`.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.decode_setup import (
    agreement,
    load,
    load_maps,
    make_exiting,
    make_prompts,
    write_rows,
)
from deepenough.decoding.calibration import threshold_losses
from deepenough.decoding.early_exit import KV_PROPAGATIONS
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts

QUICK = False
SEEDS = [0]


def measure(
    model: str = "smollm2",
    shortcuts: str = "runs/shortcut-real/shortcuts",
    exits: tuple[int, ...] = (5, 21),
    thresholds: tuple[float, ...] = (0.6, 0.4),
    prompts: int = 16,
    new_tokens: int = 128,
    batch: int = 16,
    threads: int = 2,
) -> dict[str, Any]:
    """Write with every fill and threshold; return agreement, layers and first differences."""
    loaded, tokenizer = load(model, threads)
    maps = load_maps(shortcuts)
    texts = make_prompts(tokenizer, prompts)
    engine = make_exiting(loaded, maps, thresholds[0], "shortcut", exits).decoding_engine
    full: list[SelfGenerated] = []
    for start in range(0, len(texts), batch):
        full += continue_prompts(engine, texts[start : start + batch], new_tokens)
    found: dict[str, Any] = {}
    for threshold in thresholds:
        for fill in KV_PROPAGATIONS:
            fast = make_exiting(loaded, maps, threshold, fill, exits)
            measured = threshold_losses(fast.decoding_engine, fast.exit_rule, full)
            losses_N, layers_N = measured(threshold)
            found[f"{fill}_{threshold:g}"] = {
                **in_use(fast, texts, full, loaded, new_tokens, batch),
                "on_full_text": 1 - float(losses_N.mean()),
                "layers_on_full_text": float(layers_N.mean()),
            }
            print(fill, threshold, found[f"{fill}_{threshold:g}"], flush=True)
    return {**found, "settings": {"policy": "gap"}}


def in_use(
    fast: Any,
    prompts: list[list[int]],
    full: list[SelfGenerated],
    model: Any,
    new_tokens: int,
    batch: int,
) -> dict[str, float]:
    """Return how the exiting model's own texts compare with the full model's."""
    rows: list[list[int]] = []
    depths: list[int] = []
    for start in range(0, len(prompts), batch):
        rows += write_rows(fast, prompts[start : start + batch], model, new_tokens)
        depth = fast.trace.depth
        depths += depth[depth > 0].tolist()
    same, firsts = [], []
    for row, text in zip(rows, full, strict=True):
        own, other = torch.tensor(row), text.ids_T[text.prompt :]
        length = min(len(own), len(other))
        equal = own[:length] == other[:length]
        same.append(float(equal.sum()) / max(len(own), len(other)))
        firsts.append(int(equal.long().cumprod(0).sum()))
    return {
        "agreement": agreement(fast.decoding_engine, prompts, rows),
        "same_place": statistics.fmean(same),
        "first_difference": statistics.fmean(firsts),
        "layers": statistics.fmean(depths),
    }
