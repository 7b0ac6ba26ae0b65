"""What SmolLM2-135M loses at 0.83 and 0.73 of its layers, by linear maps and by dropped layers.

Pruned on the training split of WikiText-2 (raw), measured on the first 20,000 tokens of its
validation split, in windows of 512 tokens that follow one another: perplexity, KL from the full
model, agreement of first choices, and minutes. Beside it whole layers are dropped by influence
(ShortGPT) and as the best contiguous run, for the same budget. `steps` also measures what each part
of the method adds. What is finished, models included, stays in the folder of the runs, so the same
command goes on where it was stopped:

    python -m benchmarks prune_smollm2-weights runs=runs/prune
    python -m benchmarks prune_smollm2-time runs=runs/prune threads=2
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.shortcut_real import running_text
from deepenough.artifacts import write_json
from deepenough.data.corpus import open_corpus
from deepenough.hf.loading import load
from deepenough.shortcut.commands import passages
from deepenough.shortcut.config import PruneConfig
from deepenough.shortcut.pruning import compare_outputs, prune, report_of
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
VARIANTS: dict[str, dict[str, Any]] = {
    "weights": {"budget": "weights"},
    "time": {"budget": "time"},
}
CORPUS = "wikitext-2-raw"
METHODS = ("replace", "influence", "contiguous")
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"refit": False},
    "refitted": {"correct": False},
    "fewer_tokens": {"fit_tokens": 20_000},
}
"""Ways of doing less, at the first share."""


def measure(
    runs: str = "runs/prune-smollm2",
    model: str = "smollm2",
    budget: str = "weights",
    shares: Sequence[float] = (0.83, 0.73),
    fit_tokens: int = PruneConfig().fit_tokens,
    valid_tokens: int = 20_480,
    steps: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """Prune in all ways and return what each is worth.

    Args:
        runs: Folder of the pruned models and of what is finished.
        model: Name or folder of the model.
        budget: What the shares are of: time, weights or flops.
        shares: Shares of the cost of the layers to keep.
        fit_tokens: Tokens to fit maps on.
        valid_tokens: Tokens to measure on.
        steps: Measure parts of the method as well.
        threads: Threads of torch.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    full, tokenizer = load(model)
    folder = Path(runs) / budget
    train = passages(list(open_corpus(CORPUS).lines("train")))
    valid = running_text(tokenizer, CORPUS, "valid", valid_tokens)
    ways: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS}
    found: dict[str, Any] = {}
    for share in shares:
        own = ways | (STEPS if steps and share == shares[0] else {})
        for name, options in own.items():
            config = PruneConfig(keep=share, budget=budget, fit_tokens=fit_tokens)  # type: ignore
            place = folder / f"{share}-{name}"
            found.setdefault(f"keep_{round(100 * share)}", {})[name] = stage(
                place,
                lambda c=config, o=options, p=place: pruned_scores(
                    full, tokenizer, train, valid, c, o, p
                ),
            )
    return {**found, "settings": {"corpus": CORPUS, "model": model, "threads": threads}}


def stage(folder: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a folder keeps of a stage that is finished, or make it."""
    path = folder / "scores.json"
    if not path.is_file():
        found = dict(make())
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"scores": json.dumps(found)})
        print(f"{folder}: {found}", flush=True)
    return dict(json.loads(json.loads(path.read_text())["scores"]))


def pruned_scores(
    full: Any,
    tokenizer: Any,
    train: list[str],
    valid: list[str],
    config: PruneConfig,
    options: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Prune in one way, save the model, and return what it is worth."""
    began = time.perf_counter()
    shared = folder.parent / "search"  # maps and single replacements serve all shares
    pruned = prune(full, tokenizer, train, config=config, folder=shared, **options)
    minutes = (time.perf_counter() - began) / 60
    report = report_of(pruned)
    pruned.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    scores = compare_outputs(full, pruned, tokenizer, valid)
    return scores | {
        "share": report["share"],
        "held_out_kl": report["kl"],
        "minutes": minutes,
        "evaluations": report["evaluations"],
        "token_share": report["token_seconds"]["pruned"] / report["token_seconds"]["full"],
        "stage_seconds": report.get("stages", {}),
    }
