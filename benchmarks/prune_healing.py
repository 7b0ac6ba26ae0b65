"""What equal steps of healing give a model with linear maps and one of dropped layers.

Takes the models that `python -m benchmarks prune_smollm2 runs=RUNS` has left, of the layers dropped
those that leave a little more time than the maps, and trains each towards the full model's outputs,
on articles of WikiText-2 that no map was fitted on: 60, 200 and 600 steps of 128 tokens, each a
training of its own whose learning rate falls to zero. Measured as there, on half as many tokens.
What is finished stays in the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.figures import require
from benchmarks.prune_smollm2 import CORPUS, stage
from benchmarks.shortcut_real import running_text
from deepenough.data.corpus import open_corpus
from deepenough.hf.loading import load
from deepenough.shortcut.commands import passages
from deepenough.shortcut.config import HealTrainingConfig
from deepenough.shortcut.healing import heal
from deepenough.shortcut.pruning import compare_outputs
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
BATCH = 128
"""Tokens of a step."""


def measure(
    runs: str = "runs/prune-smollm2",
    model: str = "smollm2",
    keep: float = 0.73,
    steps: Sequence[int] = (60, 200, 600),
    methods: Sequence[str] = ("replace", "influence_above"),
    threads: int = 1,
) -> dict[str, Any]:
    """Heal what was pruned and return what it is worth after so many steps.

    Args:
        runs: Folder of `prune_smollm2`.
        model: Name or folder of the model.
        keep: Share of the layers' time that was kept.
        steps: Steps of each training.
        methods: Ways of pruning.
        threads: Threads of torch.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    full, tokenizer = load(model)
    texts = passages(list(open_corpus(CORPUS).lines("train")))
    texts = texts[len(texts) // 2 :]  # maps were fitted on the beginning
    valid = running_text(tokenizer, CORPUS, "valid", 10_240)
    found: dict[str, Any] = {}

    def healed(folder: Path, num: int) -> dict[str, Any]:
        pruned = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        settings = HealTrainingConfig(str(folder / f"healing-{num}"), batch=BATCH)
        settings.train.steps, settings.train.schedule = num, "cosine"
        settings.resume = Path(settings.out).is_dir()
        if num:
            heal(full, pruned, tokenizer, texts, settings)
        return compare_outputs(full, pruned, tokenizer, valid)

    for method in methods:
        remedy = "python -m benchmarks prune_smollm2 makes it."
        folder = require(Path(runs) / f"time-{keep}-{method}", remedy)
        for num in sorted({0, *steps}):
            found.setdefault(method, {})[f"steps_{num}"] = stage(
                folder / f"healed-{num}", lambda f=folder, n=num: healed(f, n)
            )
    return {**found, "settings": {"model": model, "keep": keep, "threads": threads}}
