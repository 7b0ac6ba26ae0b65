"""The memory of a fit does not grow with the text: less than its statistics beyond the model.

Each measurement is a process of its own, whose peak resident size the system reports. Beside each
fit another only runs the model over the same batches: its peak is that of model and activations,
and of everything that is loaded. What the fit has beyond that is given as a share of the
statistics, 91 blocks of 384 x 384 for a GPT-2 of 12 layers.
"""

from __future__ import annotations

import json
import random
import resource
import string
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.figures import Figure
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import batches, make_reading, run_batch
from deepenough.shortcut.statistics import statistics_bytes

QUICK = False
SEEDS = [0]
NUM_LAYERS, WIDTH, LENGTH = 12, 384, 64
ENOUGH_POSITIONS = 100_000
"""After so many, running the model alone takes no more memory."""


def measure(
    positions: tuple[int, ...] = (10_000, 100_000, 1_000_000), threads: int = 1
) -> dict[str, Any]:
    """Measure a fit at each number of positions; return peaks and shares of the statistics."""
    statistics = statistics_bytes(NUM_LAYERS, WIDTH)
    found: dict[str, Any] = {"statistics_mb": statistics / 1e6}
    for number in positions:
        model = run("model", min(number, ENOUGH_POSITIONS), threads)["peak"]
        fit = run("fit", number, threads)
        beyond = (fit["peak"] - model) / statistics
        found[f"positions_{number}"] = {
            "positions": fit["positions"],
            "model_and_activations_mb": model / 1e6,
            "peak_mb": fit["peak"] / 1e6,
            "beyond_mb": (fit["peak"] - model) / 1e6,
            # The peak of the bare model varies by half of the statistics between processes.
            "times_the_statistics": Figure(beyond, "x", min(beyond, 0.0), max(beyond, 1.3)),
        }
    return found


class Texts:
    """Random texts of equal length, made when they are read."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[str]:
        draw = random.Random(0)
        for _ in range(self.num):
            yield "".join(draw.choices(string.ascii_letters, k=LENGTH))


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    """Return the characters of texts as ids."""
    ids = [[ord(letter) for letter in text] for text in texts]
    return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}


def make_adapter() -> Adapter:
    """Return a small GPT-2 with new weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_embd=WIDTH,
        n_inner=WIDTH,
        n_layer=NUM_LAYERS,
        n_head=6,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return adapt(GPT2LMHeadModel(config).eval().requires_grad_(False))


def peak(what: str, positions: int) -> dict[str, int]:
    """Return how large this process becomes when it runs the model, or fits."""
    adapter, texts = make_adapter(), Texts(positions // LENGTH)
    if what == "model":
        read = batches(tokenizer, texts, make_reading(adapter))
        count = sum(len(run_batch(adapter, batch)[0]) for batch in read)
    else:
        count = Shortcuts.fit(adapter, tokenizer, texts).meta["fit"]["positions"]
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"positions": count, "peak": size}


def run(what: str, positions: int, threads: int) -> dict[str, int]:
    """Return what `peak` returns in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.shortcut_memory"]
    command += [what, str(positions), str(threads)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, int] = json.loads(answer.stdout)
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    print(json.dumps(peak(sys.argv[1], int(sys.argv[2]))))
