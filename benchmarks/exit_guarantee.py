"""Does the guarantee of early exit hold, and what does it leave of the speed?

    python benchmarks/exit_guarantee.py --model smollm2 --shortcuts runs/shortcut/shortcuts [--save]

The full model continues prompts (WikiText-2 paragraphs and instructions); words and confidences of
all exits are collected in one pass over what it wrote. Then, 100 times, the texts are cut into two
random halves: on one the fastest threshold is calibrated (disagreement at most 5 %, confidence
95 %), on the other its disagreement is measured. Reported for both bounds: how many halves exceed
5 %, and the layers saved. The threshold calibrated on all texts is then timed: transformers'
`generate`, our full loop and the exiting model take turns on each prompt.

With `--own-text` the exiting model writes the texts itself, anew for each of `--thresholds`, and
its words are compared with what the full model would have said at each place.
"""

from __future__ import annotations

import argparse
import statistics
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
from torch import Tensor

from deepenough.decoding.api import speculate
from deepenough.decoding.calibration import THRESHOLDS, write
from deepenough.decoding.guarantee import BOUNDS, calibrate
from deepenough.decoding.losses import ExitTable, losses_in_use, with_threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--max-disagreement", type=float, default=0.05)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--own-text", action="store_true")
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--timed", type=int, default=4, help="prompts that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model, tokenizer, shortcuts = load(arguments)
    prompts = make_prompts(tokenizer, arguments, arguments.texts + arguments.timed)
    kept, timed = prompts[: arguments.texts], prompts[arguments.texts :]
    # Exits are chosen for a threshold in the middle, before anything is calibrated.
    fast = make_exiting(model, shortcuts, arguments, 0.5, "deferred")
    engine, early = fast.decoding_engine, fast.exit_rule
    thresholds = arguments.thresholds
    points = measure(fast, kept, arguments)
    losses_NT = torch.stack([point.losses_N for point in points], dim=1)
    layers_NT = torch.stack([point.layers_N for point in points], dim=1)
    limits = (arguments.max_disagreement, arguments.confidence)
    result: dict[str, Any] = {
        "model": arguments.model,
        "texts": len(kept),
        "tokens": points[0].tokens,
        "written_by": "the exiting model" if arguments.own_text else "the full model",
        "layers": engine.num_layers,
        "exits": list(early.layers),
        "policy": arguments.policy,
        "shortlist": arguments.shortlist,
        "fill": early.kv_propagation,
        "curve": [
            {"threshold": threshold, "disagreement": risk, "layers": layers}
            for threshold, risk, layers in zip(
                thresholds, losses_NT.mean(0).tolist(), layers_NT.mean(0).tolist(), strict=True
            )
        ],
        "splits": {
            bound: split(losses_NT, layers_NT, thresholds, limits, bound, arguments.splits)
            for bound in BOUNDS
        },
    }
    chosen = {bound: calibrate(losses_NT, thresholds, *limits, bound) for bound in BOUNDS}
    result["calibrated_on_all"] = {bound: found.threshold for bound, found in chosen.items()}
    found = [each.threshold for each in chosen.values() if each.threshold is not None]
    if found:
        arguments.exits = list(early.layers)
        exiting = make_exiting(model, shortcuts, arguments, min(found), "deferred")
        result["in_use"] = {
            "threshold": min(found),
            **speed(model, exiting, timed, arguments),
        }
    name = f"exit_guarantee_{Path(arguments.model).name.lower()}"
    save_result(name + "_own_text" * arguments.own_text, result, arguments.save)


def measure(fast: Any, prompts: Sequence[list[int]], arguments: argparse.Namespace) -> list[Any]:
    """Losses and layers of all texts at every threshold."""
    engine, early, batch = fast.decoding_engine, fast.exit_rule, arguments.batch
    new, points = arguments.new_tokens, []
    if not arguments.own_text:
        written = write(engine, prompts, new, batch, _tell)
        table = ExitTable.collect(
            engine, early, written, batch, lambda *n: _tell("texts measured", *n)
        )
        return [table.losses_at(threshold) for threshold in arguments.thresholds]
    for threshold in arguments.thresholds:
        chosen = with_threshold(early, threshold)
        points.append(losses_in_use(fast, chosen, prompts, new, batch=batch))
        print(f"threshold {threshold}: {float(points[-1].losses_N.mean()):.4f}", flush=True)
    return points


def _tell(what: str, done: int, of: int) -> None:
    if done % 64 == 0 or done == of:
        print(f"{what}: {done} of {of}", flush=True)


def split(
    losses_NT: Tensor,
    layers_NT: Tensor,
    thresholds: Sequence[float],
    limits: tuple[float, float],
    bound: str,
    splits: int,
) -> dict[str, Any]:
    """Random halves: calibrated on one, tested on the other."""
    generator = torch.Generator().manual_seed(0)
    half = len(losses_NT) // 2
    tested, chosen, layers, none = [], [], [], 0
    for _ in range(splits):
        order = torch.randperm(len(losses_NT), generator=generator)
        found = calibrate(losses_NT[order[:half]], thresholds, *limits, bound)
        if found.threshold is None:  # then the full model is used
            none += 1
            continue
        column = thresholds.index(found.threshold)
        tested.append(float(losses_NT[order[half:], column].mean()))
        layers.append(float(layers_NT[order[half:], column].mean()))
        chosen.append(found.threshold)
    return {
        "splits": splits,
        "texts_to_calibrate": half,
        "exceeded": sum(loss > limits[0] for loss in tested),
        "none_holds": none,
        "threshold_median": statistics.median(chosen) if chosen else None,
        "disagreement_mean": statistics.fmean(tested) if tested else None,
        "disagreement_max": max(tested, default=None),
        "layers_mean": statistics.fmean(layers) if layers else None,
    }


def speed(
    model: Any, exiting: Any, timed: Sequence[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    options, ends = options_of(model, arguments.new_tokens), end_tokens(model)

    def way(generator: Any) -> Any:
        def run(prompt: list[int]) -> int:
            return generator.generate(**padded([prompt]), **options).shape[1] - len(prompt)

        return run

    ways = {
        "generate": way(model),
        "loop": way(speculate(model, "none")),
        "exit": way(exiting),
    }
    rates = interleaved(ways, timed, arguments.rounds)
    rows, layers = [], []
    for prompt in timed:
        output = exiting.generate(**padded([prompt]), **options)
        rows += new_tokens_of(output, len(prompt), ends)
        layers += exiting.trace.depth[0].tolist()
    return {
        "tokens_per_second": rates,
        "times_generate": {name: rate / rates["generate"] for name, rate in rates.items()},
        "layers_mean": statistics.fmean(layers),
        "agreement": agreement(exiting.decoding_engine, timed, rows),
    }


if __name__ == "__main__":
    main()
