"""Thresholds calibrated for at most 5 % disagreement keep that promise on texts not seen.

The full model continues prompts (WikiText-2 paragraphs and instructions); tokens and confidences of
all exits are collected in one pass over what it wrote. Then, 100 times, the texts are cut into two
random halves: on one the fastest threshold is calibrated (disagreement at most 5 %, confidence
95 %), on the other its disagreement is measured. Kept: how many halves exceed 5 %, and the layers.
Then transformers' `generate`, our full loop and the exiting model take turns on each prompt. Maps
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
    load,
    load_maps,
    make_exiting,
    make_loop,
    make_prompts,
    write_rows,
)
from benchmarks.figures import interleaved
from deepenough.decoding.calibration import THRESHOLDS, learn_then_test, threshold_losses
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts

QUICK = False
SEEDS = [0]
LIMITS = (0.05, 0.95)
"""Disagreement at most, and confidence."""


def measure(
    texts: int = 400,
    batch: int = 32,
    exits: tuple[int, ...] = (5, 21),
    thresholds: tuple[float, ...] = THRESHOLDS,
    timed_threshold: float = 0.5,
    model: str = "smollm2",
    shortcuts: str = "runs/shortcut-real/shortcuts",
    new_tokens: int = 32,
    splits: int = 100,
    timed: int = 4,
    rounds: int = 5,
    threads: int = 2,
) -> dict[str, Any]:
    """Calibrate and test on random halves, then time a threshold.

    Args:
        texts: Texts to calibrate and test on.
        batch: Texts at once.
        exits: Layers of the exits.
        thresholds: Thresholds to choose from.
        timed_threshold: The threshold that is timed.
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
    fast = make_exiting(full, maps, timed_threshold, "deferred", exits)
    written: list[SelfGenerated] = []
    for start in range(0, texts, batch):
        some = prompts[start : min(start + batch, texts)]
        written += continue_prompts(fast.decoding_engine, some, new_tokens)
    measured = threshold_losses(fast.decoding_engine, fast.exit_rule, written)
    points = zip(*(measured(threshold) for threshold in thresholds), strict=True)
    losses_NT, layers_NT = (torch.stack(each, dim=1) for each in points)
    means = losses_NT.mean(0).tolist(), layers_NT.mean(0).tolist()
    return {
        "tokens": sum(len(text.ids_T) - text.prompt for text in written),
        "curve": {
            f"threshold_{threshold:g}": {"disagreement": risk, "layers": layers}
            for threshold, risk, layers in zip(thresholds, *means, strict=True)
        },
        "splits": split(losses_NT, layers_NT, thresholds, splits),
        "in_use": {
            "threshold": timed_threshold,
            **speed(full, fast, prompts[texts:], new_tokens, rounds),
        },
        "settings": {"exits": list(exits), "policy": "gap", "fill": "deferred"},
    }


def split(
    losses_NT: Tensor, layers_NT: Tensor, thresholds: Sequence[float], splits: int
) -> dict[str, Any]:
    """Return what becomes of thresholds calibrated on random halves when tested on the others."""
    generator = torch.Generator().manual_seed(0)
    half = len(losses_NT) // 2
    tested, chosen, layers, none = [], [], [], 0
    for _ in range(splits):
        order = torch.randperm(len(losses_NT), generator=generator)
        columns = dict(zip(thresholds, losses_NT[order[:half]].unbind(1), strict=True))
        found, _, _ = learn_then_test(columns.__getitem__, thresholds, *LIMITS)
        if found is None:  # then the full model is used
            none += 1
            continue
        column = thresholds.index(found)
        tested.append(float(losses_NT[order[half:], column].mean()))
        layers.append(float(layers_NT[order[half:], column].mean()))
        chosen.append(found)
    return {
        "halves": splits,
        "exceeded": sum(loss > LIMITS[0] for loss in tested),
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
