"""Thresholds calibrated for at most 5 % disagreement keep that promise on texts not seen.

The full model continues prompts (WikiText-2 paragraphs and instructions); tokens and confidences of
all exits are collected in one pass over what it wrote. Then, 100 times, the texts are cut into two
random halves: on one the fastest threshold is calibrated (disagreement at most 5 %, confidence
95 %), on the other its disagreement is measured. Kept for both bounds: how many halves exceed 5 %,
and the layers. The threshold calibrated on all texts is then timed: transformers' `generate`, our
full loop and the exiting model take turns on each prompt.

In the variant `own_text` the exiting model writes the texts itself, anew for each threshold. Maps
come from `python -m benchmarks shortcut_real`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode_setup import (
    agreement,
    exits_that_pay,
    load,
    load_maps,
    make_exiting,
    make_loop,
    make_prompts,
    write_rows,
)
from benchmarks.figures import interleaved
from deepenough.decoding.calibration import BOUNDS, THRESHOLDS, learn_then_test, write
from deepenough.decoding.exit_losses import ExitTable, losses_in_use, with_threshold

QUICK = False
SEEDS = [0]
VARIANTS = {
    "full_text": {"texts": 400, "batch": 32},
    "own_text": {
        "texts": 240,
        "batch": 40,
        "own_text": True,
        "exits": (5, 21),
        "thresholds": (0.8, 0.7, 0.6, 0.5),
    },
}
LIMITS = (0.05, 0.95)
"""Disagreement at most, and confidence."""


def measure(
    texts: int = 400,
    batch: int = 32,
    own_text: bool = False,
    exits: tuple[int, ...] | None = None,
    thresholds: tuple[float, ...] = tuple(THRESHOLDS),
    model: str = "smollm2",
    shortcuts: str = "runs/shortcut-real/shortcuts",
    new_tokens: int = 32,
    splits: int = 100,
    timed: int = 4,
    rounds: int = 5,
    threads: int = 2,
) -> dict[str, Any]:
    """Calibrate and test on random halves, then time the threshold that holds on all texts.

    Args:
        texts: Texts to calibrate and test on.
        batch: Texts at once.
        own_text: Whether the exiting model writes the texts.
        exits: Layers of the exits; by default those that pay here, chosen for a threshold in the
            middle before anything is calibrated.
        thresholds: Thresholds to choose from.
        model: Name or folder of the model.
        shortcuts: Folder of its maps.
        new_tokens: New tokens a text.
        splits: Random halves.
        timed: Other prompts, which are timed.
        rounds: Rounds of timing.
        threads: Threads of torch.
    """
    full, tokenizer = load(model, threads)
    maps = load_maps(shortcuts)
    prompts = make_prompts(tokenizer, texts + timed)
    exits = exits or tuple(exits_that_pay(full, maps, 0.5, "deferred"))
    fast = make_exiting(full, maps, 0.5, "deferred", exits)
    points = collect(fast, prompts[:texts], thresholds, new_tokens, batch, own_text)
    losses_NT = torch.stack([point.losses_N for point in points], dim=1)
    layers_NT = torch.stack([point.layers_N for point in points], dim=1)
    means = losses_NT.mean(0).tolist(), layers_NT.mean(0).tolist()
    found: dict[str, Any] = {
        "tokens": points[0].tokens,
        "curve": {
            f"threshold_{threshold:g}": {"disagreement": risk, "layers": layers}
            for threshold, risk, layers in zip(thresholds, *means, strict=True)
        },
        "splits": {
            bound: split(losses_NT, layers_NT, thresholds, LIMITS, bound, splits)
            for bound in BOUNDS
        },
    }
    chosen = [learn_then_test(losses_NT, thresholds, *LIMITS, bound).threshold for bound in BOUNDS]
    held = [threshold for threshold in chosen if threshold is not None]
    if held:
        exiting = make_exiting(full, maps, min(held), "deferred", exits)
        found["in_use"] = {
            "threshold": min(held),
            **speed(full, exiting, prompts[texts:], new_tokens, rounds),
        }
    return {**found, "settings": {"exits": list(exits), "policy": "gap", "fill": "deferred"}}


def collect(
    fast: Any,
    prompts: Sequence[list[int]],
    thresholds: Sequence[float],
    new_tokens: int,
    batch: int,
    own_text: bool,
) -> list[Any]:
    """Return losses and layers of all texts at every threshold."""
    engine, early = fast.decoding_engine, fast.exit_rule
    if own_text:
        return [
            losses_in_use(fast, with_threshold(early, each), prompts, new_tokens, batch=batch)
            for each in thresholds
        ]
    written = write(engine, prompts, new_tokens, batch)
    table = ExitTable.collect(engine, early, written, batch)
    return [table.losses_at(threshold) for threshold in thresholds]


def split(
    losses_NT: Tensor,
    layers_NT: Tensor,
    thresholds: Sequence[float],
    limits: tuple[float, float],
    bound: str,
    splits: int,
) -> dict[str, Any]:
    """Return what becomes of thresholds calibrated on random halves when tested on the others."""
    generator = torch.Generator().manual_seed(0)
    half = len(losses_NT) // 2
    tested, chosen, layers, none = [], [], [], 0
    for _ in range(splits):
        order = torch.randperm(len(losses_NT), generator=generator)
        found = learn_then_test(losses_NT[order[:half]], thresholds, *limits, bound)
        if found.threshold is None:  # then the full model is used
            none += 1
            continue
        column = thresholds.index(found.threshold)
        tested.append(float(losses_NT[order[half:], column].mean()))
        layers.append(float(layers_NT[order[half:], column].mean()))
        chosen.append(found.threshold)
    return {
        "halves": splits,
        "exceeded": sum(loss > limits[0] for loss in tested),
        "none_holds": none,
        "threshold_median": statistics.median(chosen) if chosen else None,
        "disagreement_mean": statistics.fmean(tested) if tested else None,
        "disagreement_max": max(tested, default=None),
        "layers_mean": statistics.fmean(layers) if layers else None,
    }


def speed(
    model: Any, exiting: Any, prompts: Sequence[list[int]], new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Time `generate`, our loop and the exiting model in turns; return rates and agreement."""

    def way(generator: Any) -> Any:
        return lambda prompt: write_rows(generator, [prompt], model, new_tokens)[0]

    ways = {"generate": way(model), "loop": way(make_loop(model)), "exit": way(exiting)}
    timings = interleaved(ways, rounds, prompts)
    layers: list[int] = []
    for prompt in prompts:
        ways["exit"](prompt)
        layers += exiting.trace.depth[0].tolist()
    rows = timings.results["exit"]
    return {
        "tokens_per_second": {
            name: timings.rate(name, sum(map(len, results)), "tokens/s")
            for name, results in timings.results.items()
        },
        "times_generate": {name: timings.ratio("generate", name) for name in ways},
        "layers_mean": statistics.fmean(layers),
        "agreement": agreement(exiting.decoding_engine, prompts, rows),
    }
