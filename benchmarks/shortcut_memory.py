"""Memory of a fit beyond the model and its activations, at 10,000 to 1,000,000 positions.

    python benchmarks/shortcut_memory.py [--positions 10000 100000 1000000] [--save]

Each measurement is a process of its own, whose peak resident size the system reports. Beside each
fit another only runs the model over the same batches: its peak is that of model and activations,
and of everything that is loaded. What the fit has beyond that is given as a share of the
statistics, 91 blocks of 384 x 384 for a GPT-2 of 12 layers.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import string
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from record import save_result
from transformers import GPT2Config, GPT2LMHeadModel

from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.fitting import make_plan, plan_bytes
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import iterate_states

NUM_LAYERS, WIDTH, LENGTH = 12, 384, 64
ENOUGH_POSITIONS = 100_000
"""After so many, running the model alone takes no more memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", choices=["model", "fit"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.positions[0])))
        return
    statistics = plan_bytes(make_plan(NUM_LAYERS), WIDTH)
    fits = []
    for positions in arguments.positions:
        model = run("model", min(positions, ENOUGH_POSITIONS), arguments.threads)["peak"]
        fit = run("fit", positions, arguments.threads)
        fits.append(
            {
                "positions": fit["positions"],
                "model_and_activations_mb": model / 1e6,
                "peak_mb": fit["peak"] / 1e6,
                "beyond_mb": (fit["peak"] - model) / 1e6,
                "times_the_statistics": (fit["peak"] - model) / statistics,
            }
        )
    result = {"statistics_mb": statistics / 1e6, "fits": fits}
    save_result("shortcut_memory", result, arguments.save)


class Texts:
    """So many random texts of equal length, made when they are read."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[str]:
        draw = random.Random(0)
        for _ in range(self.num):
            yield "".join(draw.choices(string.ascii_letters, k=LENGTH))


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    """Characters as ids."""
    ids = [[ord(letter) for letter in text] for text in texts]
    return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}


def make_adapter() -> Adapter:
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


def measure(what: str, positions: int) -> dict[str, int]:
    """In a fresh process: do it, and say how large the process became."""
    adapter, texts = make_adapter(), Texts(positions // LENGTH)
    if what == "model":
        count = sum(len(batch.position) for batch in iterate_states(adapter, tokenizer, texts))
    else:
        count = Shortcuts.fit(adapter, tokenizer, texts).meta["fit"]["positions"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"positions": count, "peak": peak}


def run(what: str, positions: int, threads: int) -> dict[str, int]:
    words = ["--measure", what, "--positions", str(positions), "--threads", str(threads)]
    answer = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE)
    found: dict[str, int] = json.loads(answer.stdout)
    return found


if __name__ == "__main__":
    main()
