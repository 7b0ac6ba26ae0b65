"""A searched pattern is within 1 % of the interleaved baseline with 39 % less forward time.

The search follows `configs/par-long-context.yaml` and derives within its latency budget. The
searched pattern and the baseline are trained with every seed, hand-written patterns with the first,
all for the same number of steps with segments of 256 tokens and 256 of memory; their perplexity is
taken as they will be used, with 512 + 512. What is finished already is left alone. Then one forward
pass of every pattern is timed at 512 + 512, in turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import interleaved as timed_in_turns
from deepenough.config import resolve
from deepenough.par.config import (
    EvaluationTextConfig,
    ParEvalConfig,
    ParModelConfig,
    ParSearchConfig,
    ParTrainConfig,
    interleaved,
)
from deepenough.par.evaluation import evaluate
from deepenough.par.modeling import ParConfig, ParForCausalLM
from deepenough.par.search import sample_segment
from deepenough.par.training import derive_run, search, train
from deepenough.runs import RunFolder

QUICK = False
SEEDS = [0, 1, 2]
CONFIG = Path(__file__).parent.parent / "configs" / "par-long-context.yaml"
HAND_WRITTEN = ("daddaddadd", "dddddddddd")
TRAINED, USED = 256, 512  # tokens of a segment, and as many of memory
STREAMS = 4
STEPS = 2400


def measure(runs: str = "runs/par-point", rounds: int = 15) -> dict[str, Any]:
    """Search and train what is missing, then time all patterns; return perplexities and times."""
    folder, settings = Path(runs), resolve(ParSearchConfig, str(CONFIG))
    baseline = interleaved(settings.model.num_blocks)
    searched = find_pattern(folder / "search-0", settings)
    seeds = {baseline: SEEDS, searched: SEEDS} | dict.fromkeys(HAND_WRITTEN, SEEDS[:1])
    perplexities = {
        pattern: [train_pattern(folder, pattern, seed) for seed in each]
        for pattern, each in seeds.items()
    }
    torch.manual_seed(0)
    model = replace(settings.model, mem_len=USED)
    timings = timed_in_turns(
        {pattern: forward_function(model, pattern) for pattern in perplexities},
        rounds,
        warmup=2,
    )
    means = {pattern: statistics.mean(values) for pattern, values in perplexities.items()}
    return {
        **{
            pattern: {
                "milliseconds": 1000 * min(timings.seconds[pattern]),
                "relative_time": timings.ratio(pattern, baseline),
                "perplexity": {f"seed_{n}": value for n, value in enumerate(values)},
                "relative_perplexity": means[pattern] / means[baseline],
            }
            for pattern, values in perplexities.items()
        },
        "settings": {
            "config": f"configs/{CONFIG.name}",
            "searched": searched,
            "baseline": baseline,
            "steps": STEPS,
            "trained_at": TRAINED,
            "used_at": USED,
            "streams": STREAMS,
        },
    }


def forward_function(model: ParModelConfig, pattern: str) -> Callable[[], Any]:
    """Return a function that evaluates a segment of every stream, with new weights."""
    sizes = asdict(model) | {"pattern": pattern, "length": USED}
    new = ParForCausalLM(ParConfig(12000, **sizes)).eval()
    ids, memories = sample_segment(new, STREAMS)
    return torch.inference_mode()(lambda: new(ids, targets=ids, memories=memories))


def find_pattern(folder: Path, settings: ParSearchConfig) -> str:
    """Return the pattern that the search finds within its budget, searching if need be."""
    if (folder / "model").exists():
        found = derive_run(RunFolder.open(folder), settings.search.budget)
    else:
        found = search(replace(settings, out=str(folder), resume=folder.exists()))
    print(f"searched {found.pattern}, {found.relative_cost:.3f} of the baseline", flush=True)
    return found.pattern


def train_pattern(runs: Path, pattern: str, seed: int) -> float:
    """Return the validation perplexity of a pattern in use, training it if need be."""
    folder = runs / f"{pattern}-{seed}"
    evaluated = folder / f"valid-{USED}.json"
    settings = resolve(ParSearchConfig, str(CONFIG))
    if not (folder / "model").exists():
        model = replace(settings.model, pattern=pattern, mem_len=TRAINED)
        steps = replace(
            settings.train, seed=seed, steps=STEPS, valid_every=STEPS, save_every=STEPS // 12
        )
        train(
            ParTrainConfig(
                out=str(folder),
                resume=folder.exists(),
                data=settings.data,
                dataset=replace(settings.dataset, batch_size=STREAMS, length=TRAINED),
                model=model,
                train=steps,
            )
        )
    if not evaluated.exists():
        text = EvaluationTextConfig(batch_size=STREAMS, length=USED)
        used = ParEvalConfig(str(folder), settings.data, "valid", USED, dataset=text)
        evaluated.write_text(json.dumps(evaluate(used)))
    perplexity: float = json.loads(evaluated.read_text())["perplexity"]
    print(f"{pattern}, seed {seed}: {perplexity:.2f}", flush=True)
    return perplexity
