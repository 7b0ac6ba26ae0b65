"""What SmolLM2-135M loses at 0.83 and 0.73 of its layers' time, by maps and by dropped layers.

Pruned on the training split of WikiText-2 (raw), measured on the first 20,000 tokens of its
validation split, in windows of 512 tokens that follow one another: perplexity, KL from the full
model, agreement of first choices, and minutes. Beside it whole layers are dropped by influence
(ShortGPT) and as the best contiguous run, for the same budget; as a layer is dropped whole, that
may leave less time than asked for, so they are also dropped for a little more. `steps` measures
what each part of the method adds. What is finished, models included, stays in the folder of the
runs, so the same command goes on where it was stopped:

    python -m benchmarks prune_smollm2 runs=runs/prune-smollm2 threads=2
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.shortcut_real import running_text
from deepenough.artifacts import write_json
from deepenough.data.corpus import open_corpus
from deepenough.hf.loading import load
from deepenough.shortcut.commands import passages
from deepenough.shortcut.config import PruneConfig
from deepenough.shortcut.pruning import compare_all, prune, report_of
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
CORPUS = "wikitext-2-raw"
METHODS = ("replace", "influence", "contiguous")
ONE_LAYER = 0.02
"""By how much more time one layer more of SmolLM2 can stay."""
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"refit": False},
    "refitted": {"correct": False},
    "fewer_tokens": {"fit_tokens": 20_000},
}
"""Ways of doing less, at the first share."""


def measure(
    runs: str = "runs/prune-smollm2",
    model: str = "smollm2",
    budget: str = "time",
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
    train = passages(list(open_corpus(CORPUS).lines("train")))
    valid = running_text(tokenizer, CORPUS, "valid", valid_tokens)
    found = prune_all(
        full,
        tokenizer,
        train,
        valid,
        Path(runs),
        shares,
        fit_tokens,
        AutoModelForCausalLM,
        budget,
        steps,
        above=True,
    )
    return {**found, "settings": {"corpus": CORPUS, "model": model, "threads": threads}}


def prune_all(
    full: Any,
    tokenizer: Any,
    train: list[str],
    valid: list[str],
    folder: Path,
    shares: Sequence[float],
    fit_tokens: int,
    auto: Any,
    budget: str = "weights",
    steps: bool = False,
    above: bool = False,
) -> dict[str, Any]:
    """Prune a model to several shares in all ways and return what each is worth on other text.

    Args:
        full: The model.
        tokenizer: The model's.
        train: Texts to prune by.
        valid: Texts to measure on.
        folder: Folder of the pruned models and of what is finished.
        shares: Shares of the cost of the layers to keep.
        fit_tokens: Tokens to fit maps on.
        auto: The class of transformers that loads such a model.
        budget: What the shares are of.
        steps: Measure parts of the method as well.
        above: Also drop one layer less.
    """
    found: dict[str, Any] = {}
    for share in shares:
        ways: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS}
        if above:
            more = share + ONE_LAYER
            ways |= {f"{m}_above": {"method": m, "keep": more} for m in METHODS if m != "replace"}
        if steps and share == shares[0]:
            ways |= STEPS
        own: dict[str, Any] = {}
        folders: dict[str, Path] = {}
        for name, options in ways.items():
            config = PruneConfig(keep=share, budget=budget, fit_tokens=fit_tokens)  # type: ignore
            place = folders[name] = folder / f"{budget}-{share}-{name}"
            own[name] = stage(
                place, lambda c=config, o=options, p=place: make(full, tokenizer, train, c, o, p)
            )
        scores = stage(
            folder / f"{budget}-{share}-scores",
            lambda f=folders: compare(full, f, tokenizer, valid, auto),
        )
        found[f"keep_{round(100 * share)}"] = {n: own[n] | scores[n] for n in folders}
    return found


def compare(
    full: Any, folders: Mapping[str, Path], tokenizer: Any, texts: list[str], auto: Any
) -> dict[str, dict[str, float]]:
    """Return what the models in folders are worth on a text, beside the full one."""
    models = {n: auto.from_pretrained(place / "model").eval() for n, place in folders.items()}
    return compare_all(full, models, tokenizer, texts)


def stage(folder: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a folder keeps of a stage that is finished, or make it."""
    path = folder / "scores.json"
    if not path.is_file():
        found = dict(make())
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"scores": json.dumps(found)})
        print(f"{folder}: {found}", flush=True)
    return dict(json.loads(json.loads(path.read_text())["scores"]))


def make(
    full: Any,
    tokenizer: Any,
    train: list[str],
    config: PruneConfig,
    options: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Prune in one way, save the model, and return what that took."""
    began = time.perf_counter(), time.process_time()
    shared = folder.parent / "search"  # maps and single replacements serve all budgets
    pruned = prune(full, tokenizer, train, config=config, folder=shared, **options)
    report = report_of(pruned)
    pruned.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "share": report["share"],
        "held_out_kl": report["kl"],
        "minutes": (time.perf_counter() - began[0]) / 60,
        "processor_minutes": (time.process_time() - began[1]) / 60,
        "evaluations": report.get("evaluations", 0.0),
        **{name: report[name] for name in ("measured_share",) if name in report},
        "token_share": report["token_seconds"]["pruned"] / report["token_seconds"]["full"],
        "stage_seconds": report.get("stages", {}),
    }
