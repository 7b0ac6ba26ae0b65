"""The point of PAR: a searched pattern against the interleaved baseline where attention costs.

    python benchmarks/par_point.py train --runs runs/par-point [--seeds 3]
    python benchmarks/par_point.py measure --runs runs/par-point [--save]

`train` searches, derives within the latency budget and trains the searched pattern and the
baseline with every seed, and hand-written patterns with the first, all for the same number of steps
on the same text; what is finished already is left alone. `measure` times one forward pass of every
pattern, taking turns, and sets it beside the perplexities; with --save the table and the frontier
are kept.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, save_result

from deepenough.adaptive.par import ParForCausalLM
from deepenough.adaptive.par.pattern import interleaved
from deepenough.measure.latency import forward_function, interleaved_best
from deepenough.report import plot_frontier
from deepenough.runs import RunFolder, read_records
from deepenough.settings import resolve
from deepenough.train.par import ParSearch, ParTraining, derive_run, search, train

CONFIG = Path(__file__).parent.parent / "configs" / "par-long-context.yaml"
NUM_BLOCKS = 12
HAND_WRITTEN = ("daddaddadddd", "dadddadddddd", "dddddddddddd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["train", "measure"])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search-steps", type=int, default=400)
    parser.add_argument("--cache", default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.action == "train":
        train_all(arguments)
    else:
        measure_all(arguments)


def settings_of(arguments: argparse.Namespace, seed: int) -> ParSearch:
    settings = resolve(ParSearch, str(CONFIG))
    settings.data = replace(settings.data, cache=arguments.cache)
    settings.train = replace(settings.train, seed=seed)
    return settings


def train_all(arguments: argparse.Namespace) -> None:
    searched = find_pattern(arguments, seed=0)
    for seed in range(arguments.seeds):
        train_pattern(arguments, interleaved(NUM_BLOCKS), seed)
        train_pattern(arguments, searched, seed)
    for each in HAND_WRITTEN:
        train_pattern(arguments, each, seed=0)


def find_pattern(arguments: argparse.Namespace, seed: int) -> str:
    settings = settings_of(arguments, seed)
    steps = arguments.search_steps
    settings.train = replace(settings.train, steps=steps, valid_every=steps, save_every=steps)
    folder = arguments.runs / f"search-{seed}"
    settings.run = replace(settings.run, folder=str(folder), resume=folder.exists())
    if (folder / "model").exists():
        return derive_run(
            RunFolder.open(folder), settings.search.budget, settings.search.spend
        ).pattern
    found = search(settings)
    print(f"seed {seed}: searched {found.pattern} at {found.relative_cost:.3f}", flush=True)
    return found.pattern


def train_pattern(arguments: argparse.Namespace, pattern: str, seed: int) -> None:
    folder = arguments.runs / f"{pattern}-{seed}"
    if (folder / "model").exists():
        return
    settings = settings_of(arguments, seed)
    run = replace(settings.run, folder=str(folder), resume=folder.exists())
    model = replace(settings.model, pattern=pattern)
    train(ParTraining(run=run, data=settings.data, model=model, train=settings.train))
    print(f"seed {seed}: trained {pattern}", flush=True)


def last_values(folder: Path, kind: str) -> dict[str, Any] | None:
    records, _ = read_records(folder / "metrics.jsonl")
    return next((record.values for record in reversed(records) if record.kind == kind), None)


def measure_all(arguments: argparse.Namespace) -> None:
    derived = [last_values(f, "derive") for f in sorted(arguments.runs.glob("search-*"))]
    searched = [values["pattern"] for values in derived if values is not None]
    patterns: dict[str, list[float]] = {}
    for folder in sorted(arguments.runs.glob("*-[0-9]")):
        pattern = folder.name.rpartition("-")[0]
        values = last_values(folder, "valid") if pattern != "search" else None
        if values is not None:
            patterns.setdefault(pattern, []).append(values["perplexity"])
    torch.manual_seed(0)
    settings = settings_of(arguments, 0)
    functions = {
        pattern: forward_function(
            ParForCausalLM(settings.model.config(12000, settings.data.length, pattern)),
            settings.data.batch_size,
        )
        for pattern in patterns
    }
    seconds = interleaved_best(functions, arguments.rounds, warmup=2)
    baseline = interleaved(NUM_BLOCKS)
    rows = []
    for pattern, perplexities in sorted(patterns.items(), key=lambda item: seconds[item[0]]):
        group = "searched" if pattern in searched else "hand-written"
        rows.append(
            {
                "name": pattern,
                "pattern": pattern,
                "group": "baseline" if pattern == baseline else group,
                "milliseconds": 1000 * seconds[pattern],
                "relative_time": seconds[pattern] / seconds[baseline],
                "perplexity": perplexities,
                "relative_perplexity": statistics.mean(perplexities)
                / statistics.mean(patterns[baseline]),
            }
        )
    result = {"config": f"configs/{CONFIG.name}", "searched": searched, "patterns": rows}
    save_result("par_point", result, arguments.save)
    if arguments.save:
        plot_frontier(
            rows,
            RESULTS / "par_point",
            x="relative_time",
            y="perplexity",
            x_label="forward time, share of the interleaved baseline",
            y_label="validation perplexity",
            title="WikiText-2, 256 tokens + 256 of memory",
        )


if __name__ == "__main__":
    main()
