"""The point of PAR: a searched pattern against the interleaved baseline where attention costs.

    python benchmarks/par_point.py train --runs runs/par-point [--seeds 3]
    python benchmarks/par_point.py measure --runs runs/par-point [--save]

`train` searches by `configs/par-long-context.yaml`, derives within its latency budget and trains
the searched pattern and the baseline with every seed, and hand-written patterns with the first, all
for the same number of steps with segments of 256 tokens and 256 of memory; then it takes their
perplexity as they will be used, with 512 + 512. What is finished already is left alone. `measure`
times one forward pass of every pattern at 512 + 512, taking turns, and sets it beside them;
with --save the table and the frontier are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, save_result

from deepenough.config import resolve
from deepenough.par.config import ParSearchConfig, ParTrainConfig, interleaved
from deepenough.par.evaluation import evaluate
from deepenough.par.modeling import ParForCausalLM
from deepenough.par.search import forward_function, interleaved_best
from deepenough.par.training import derive_run, search, train
from deepenough.report import plot_frontier
from deepenough.runs import RunFolder, read_records

CONFIG = Path(__file__).parent.parent / "configs" / "par-long-context.yaml"
HAND_WRITTEN = ("daddaddadd", "dddddddddd")
TRAINED, USED = 256, 512  # tokens of a segment, and as many of memory
LANES = 4
STEPS = 800
EVALUATED = f"valid-{USED}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["train", "measure"])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.action == "train":
        train_all(arguments)
    else:
        measure_all(arguments)


def settings_of(arguments: argparse.Namespace) -> ParSearchConfig:
    settings = resolve(ParSearchConfig, str(CONFIG))
    settings.data = replace(settings.data, cache=arguments.cache)
    return settings


def train_all(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    baseline = interleaved(settings.model.num_blocks)
    searched = find_pattern(arguments.runs / "search-0", settings)
    for seed in range(arguments.seeds):
        train_pattern(arguments, baseline, seed)
        train_pattern(arguments, searched, seed)
    for each in HAND_WRITTEN:
        train_pattern(arguments, each, seed=0)


def find_pattern(folder: Path, settings: ParSearchConfig) -> str:
    if (folder / "model").exists():
        found = derive_run(RunFolder.open(folder), settings.search.budget, settings.search.spend)
    else:
        settings.run = replace(settings.run, folder=str(folder), resume=folder.exists())
        found = search(settings)
    print(f"searched {found.pattern}, {found.relative_cost:.3f} of the baseline", flush=True)
    return found.pattern


def train_pattern(arguments: argparse.Namespace, pattern: str, seed: int) -> None:
    folder = arguments.runs / f"{pattern}-{seed}"
    settings = settings_of(arguments)
    data = replace(settings.data, batch_size=LANES, length=TRAINED)
    if not (folder / "model").exists():
        run = replace(settings.run, folder=str(folder), resume=folder.exists())
        model = replace(settings.model, pattern=pattern, mem_len=TRAINED)
        steps = replace(
            settings.train, seed=seed, steps=STEPS, valid_every=STEPS, save_every=STEPS // 2
        )
        train(ParTrainConfig(run=run, data=data, model=model, train=steps))
    if not (folder / EVALUATED).exists():
        data = replace(data, length=USED)
        values = evaluate(str(folder), data, "valid", mem_len=USED)
        (folder / EVALUATED).write_text(json.dumps(values))
        print(f"{pattern}, seed {seed}: {values['perplexity']:.2f}", flush=True)


def last_values(folder: Path, kind: str) -> dict[str, Any] | None:
    records, _ = read_records(folder / "metrics.jsonl")
    return next((record.values for record in reversed(records) if record.kind == kind), None)


def measure_all(arguments: argparse.Namespace) -> None:
    derived = [last_values(f, "derive") for f in sorted(arguments.runs.glob("search-*"))]
    searched = [values["pattern"] for values in derived if values is not None]
    patterns: dict[str, list[float]] = {}
    for file in sorted(arguments.runs.glob(f"*/{EVALUATED}")):
        pattern = file.parent.name.rpartition("-")[0]
        patterns.setdefault(pattern, []).append(json.loads(file.read_text())["perplexity"])
    torch.manual_seed(0)
    settings = settings_of(arguments)
    model = replace(settings.model, mem_len=USED)
    functions = {
        pattern: forward_function(ParForCausalLM(model.config(12000, USED, pattern)), LANES)
        for pattern in patterns
    }
    seconds = interleaved_best(functions, arguments.rounds, warmup=2)
    baseline = interleaved(settings.model.num_blocks)
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
    result = {
        "config": f"configs/{CONFIG.name}",
        "lanes": LANES,
        "trained_at": TRAINED,
        "used_at": USED,
        "steps": STEPS,
        "threads": torch.get_num_threads(),
        "searched": searched,
        "patterns": rows,
    }
    save_result("par_point", result, arguments.save)
    if arguments.save:
        plot_frontier(
            rows,
            RESULTS / "par_point",
            x="relative_time",
            y="perplexity",
            x_label="forward time, share of the interleaved baseline",
            y_label="validation perplexity",
            title=f"WikiText-2, {USED} tokens + {USED} of memory",
        )


if __name__ == "__main__":
    main()
