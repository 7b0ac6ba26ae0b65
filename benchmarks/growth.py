"""Time grows with tokens, layers and width as the operations do, and memory not with tokens.

Each part is timed at sizes of which one varies at a time, and a power law

    seconds = constant * tokens^a * layers^b * width^c

is fitted, each exponent by least squares of logarithms. `counted` is the same fit to the operations
that were counted at the same sizes: small sizes have lower exponents than the largest term alone.
Parts are the sums and the solving of `shortcut fit` for all pairs and for maps to the last layer,
a training step of PAR (tokens of a batch, blocks), and plain decoding with the torch backend (new
tokens). Processes are those of torchrun that share one training, each with one thread. The variant
`memory` has the peak of a process of its own that fits, or trains, on so many tokens.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.figures import Figure
from benchmarks.training_plan import training_flops
from deepenough import ParConfig, ParForCausalLM
from deepenough.decoding.api import speculate
from deepenough.hf.adapter import adapt
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.statistics import LayerStatistics, layer_pairs, layer_targets

QUICK = False
SEEDS = [0]
VARIANTS = {"time": {"what": "time"}, "memory": {"what": "memory"}}
VOCAB, LENGTH, HEADS = 2000, 32, 4
STEPS = 4
"""Training steps that are timed at once."""


@dataclass(frozen=True)
class Size:
    """What a time depends on."""

    tokens: int
    layers: int
    width: int


@dataclass(frozen=True)
class Part:
    """Something that is timed: the middle of its sizes, the others by axis, and its operations."""

    middle: Size
    sizes: dict[str, tuple[int, ...]]
    prepare: Callable[[Size], Callable[[], Any]]
    operations: Callable[[Size], float]
    batch: int = 1
    """How many of what is asked about one timing makes."""

    def all_sizes(self) -> list[Size]:
        """Return every size once."""
        changed = (
            replace(self.middle, **{axis: value})
            for axis, values in self.sizes.items()
            for value in values
        )
        return list(dict.fromkeys(changed))


def measure(
    what: str = "time",
    rounds: int = 3,
    threads: int = 2,
    shrink: int = 1,
    tokens: tuple[int, ...] = (16_384, 65_536, 262_144),
    steps: int = 60,
) -> dict[str, Any]:
    """Return exponents and rates of processes, or peaks.

    Args:
        what: time or memory.
        rounds: How often every size is timed; the best counts, and exponents have the spread.
        threads: Threads of torch.
        shrink: Divides widths, to try things out.
        tokens: How many are fitted on, and trained on, where memory is measured.
        steps: Training steps of one and of two processes.
    """
    if what == "memory":
        return {
            kind: {f"tokens_{number}": peak_of(kind, number) for number in tokens}
            for kind in ("fit", "training")
        }
    torch.set_num_threads(threads)
    torch.manual_seed(SEEDS[0])
    found = {name: grow(name, part, rounds) for name, part in parts(shrink).items()}
    return found | {"processes": processes(steps), "settings": {"rounds": rounds, "steps": steps}}


def grow(name: str, part: Part, rounds: int) -> dict[str, Any]:
    """Return the exponents of a part, counted and measured, and how well they fit."""
    seconds: dict[Size, list[float]] = {}
    for size in part.all_sizes():
        run = part.prepare(size)
        run()
        seconds[size] = []
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            seconds[size].append((time.perf_counter() - began) / part.batch)
        print(f"{name} {size}: {min(seconds[size]):.4g} s", flush=True)
    best = {size: min(times) for size, times in seconds.items()}
    operations = {size: part.operations(size) for size in seconds}
    law, counted = power_law(part, best), power_law(part, operations)
    each = [power_law(part, {s: t[row] for s, t in seconds.items()}) for row in range(rounds)]
    exponents = {}
    for axis in part.sizes:
        spread = [law[axis], *(own[axis] for own in each)]
        exponents[axis] = Figure(law[axis], "exponent", min(spread), max(spread))
    middle = seconds[part.middle]
    return {
        "exponents": exponents,
        "counted": {axis: Figure(counted[axis], "exponent") for axis in part.sizes},
        "largest_misfit": Figure(law["misfit"], "x"),
        "middle_seconds": Figure(min(middle), "s", min(middle), max(middle)),
        "gflops": max(operations[size] / best[size] / 1e9 for size in seconds),
    }


def power_law(part: Part, values: Mapping[Size, float]) -> dict[str, float]:
    """Return the exponent of `values` in each axis, and by what factor they miss one at most."""
    found, misfit = {}, 0.0
    for axis, own in part.sizes.items():
        logs = np.log(own)
        seen = np.log([values[replace(part.middle, **{axis: value})] for value in own])
        slope, start = np.polyfit(logs, seen, 1)
        misfit = max(misfit, float(np.abs(start + slope * logs - seen).max()))
        found[axis] = float(slope)
    return found | {"misfit": math.exp(misfit)}


# -- what is timed ---------------------------------------------------------------------------------


def parts(shrink: int = 1) -> dict[str, Part]:
    """Return what is timed, by name."""
    widths = tuple(width // shrink for width in (64, 128, 256, 512))
    depths, some = (3, 6, 12, 24), Size(2048, 6, 256 // shrink)
    tokens = (1024, 2048, 4096, 8192)
    solving = replace(some, tokens=1)  # once they are summed up, tokens no longer count
    found = {}
    for targets in ("all", "last"):
        found[f"statistics_{targets}"] = Part(
            some,
            {"tokens": tokens, "layers": depths, "width": widths},
            partial(sums, targets=targets),
            partial(of_sums, targets=targets),
        )
        found[f"maps_{targets}"] = Part(
            solving,
            {"layers": depths, "width": tuple(2 * width for width in widths)},
            partial(maps, targets=targets),
            partial(of_maps, targets=targets),
        )
    found["training"] = Part(
        Size(32 * LENGTH, 6, 128 // shrink),
        {
            "tokens": tuple(LENGTH * streams for streams in (8, 16, 32, 64)),
            "layers": (2, 6, 12, 24),
            "width": widths,
        },
        training_steps,
        of_training,
        STEPS,
    )
    found["decoding"] = Part(
        Size(32, 6, 512 // shrink),
        {
            "tokens": (8, 16, 32, 64),
            "layers": (3, 6, 12, 24),
            "width": tuple(width // shrink for width in (128, 256, 512, 1024)),
        },
        decoding,
        of_decoding,
    )
    return found


def random_states(size: Size, tokens: int) -> list[torch.Tensor]:
    """Return made-up states of all layers; their values do not matter to the time."""
    generator = torch.Generator().manual_seed(SEEDS[0])
    return list(torch.randn(size.layers + 1, tokens, size.width, generator=generator))


def sums(size: Size, targets: Any) -> Callable[[], Any]:
    """Return a function that sums up the states of all tokens."""
    states = random_states(size, size.tokens)
    statistics = LayerStatistics(size.layers, size.width, targets)

    def run() -> None:
        statistics.update(states)
        statistics.flush()

    return run


def of_sums(size: Size, targets: Any) -> float:
    """Return the operations of the sums: every Gram matrix is symmetric, so half of it is made."""
    own = layer_targets(size.layers, targets).values()
    return 2 * size.tokens * size.width**2 * sum(0.5 + len(each) for each in own)


def maps(size: Size, targets: Any) -> Callable[[], Any]:
    """Return a function that solves for all maps."""
    statistics = LayerStatistics(size.layers, size.width, targets)
    statistics.update(random_states(size, 2 * size.width))
    statistics.flush()
    sources = [source for source, own in statistics.target_layers.items() if own]
    return lambda: [statistics.equations[source].solve() for source in sources]


def of_maps(size: Size, targets: Any) -> float:
    """Return the operations of solving: a factor and its inverse's trace a source, then maps."""
    num_sources, num_maps = size.layers, len(layer_pairs(size.layers, targets))
    return size.width**3 * (num_sources * (1 / 3 + 2 / 3) + 2 * num_maps)


def par_config(size: Size) -> ParConfig:
    """Return a model of attention and dense blocks in turns."""
    pattern = "ad" * (size.layers // 2) + "a" * (size.layers % 2)
    sizes = {"d_model": size.width, "d_ff": 4 * size.width, "num_heads": HEADS}
    return ParConfig(VOCAB, pattern=pattern, mem_len=16, length=LENGTH, dropout=0.1, **sizes)


def training_steps(size: Size) -> Callable[[], Any]:
    """Return a function that makes some training steps."""
    streams = size.tokens // LENGTH
    model = ParForCausalLM(par_config(size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCAB, (STEPS + 1, streams, LENGTH))

    def run() -> None:
        memories = None
        for index in range(STEPS):
            output = model(ids[index], targets=ids[index + 1], memories=memories)
            memories = output.memories
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def of_training(size: Size) -> float:
    """Return the operations of a training step by the package's counters: three forward passes."""
    return training_flops(par_config(size), size.tokens // LENGTH)


def decoding(size: Size) -> Callable[[], Any]:
    """Return a function that writes new tokens greedily."""
    model = speculate(gpt2(size, 128), "none", backend="torch")
    prompt = torch.arange(1, 17)[None]
    options = {"min_new_tokens": size.tokens, "max_new_tokens": size.tokens, "do_sample": False}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def of_decoding(size: Size) -> float:
    """Return the operations of the weights, each of which is used once a token."""
    return 2 * size.tokens * (12 * size.layers * size.width**2 + VOCAB * size.width)


def gpt2(size: Size, positions: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with new weights."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=HEADS,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


# -- memory ----------------------------------------------------------------------------------------


class Texts:
    """Random texts of one length, made when they are read."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[str]:
        draw = random.Random(SEEDS[0])
        for _ in range(self.num):
            yield "".join(draw.choices("abcdefghij", k=2 * LENGTH))


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    """Return the characters of texts as ids."""
    ids = [[ord(letter) for letter in text] for text in texts]
    return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}


def fit(num_tokens: int) -> int:
    """Fit all maps of a small model on so many tokens and return how many were used."""
    model = adapt(gpt2(Size(0, 6, 128), 2 * LENGTH))
    found = Shortcuts.fit(model, tokenizer, Texts(num_tokens // (2 * LENGTH)))
    return int(found.meta["fit"]["positions"])


def training(num_tokens: int) -> int:
    """Train a small model once over a text of so many tokens and return how many were used."""
    from transformers import PreTrainedTokenizerFast

    from deepenough.config import resolve
    from deepenough.data.tokenizer import train_tokenizer
    from deepenough.data.tokens import Prepared, TokenFile
    from deepenough.par.config import ParTrainConfig
    from deepenough.par.training import train

    own: PreTrainedTokenizerFast = train_tokenizer(list(Texts(200)), 300)
    steps = num_tokens // (8 * LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tokens"
        place.mkdir()
        used = steps * 8 * LENGTH + 1
        np.random.default_rng(SEEDS[0]).integers(260, size=used, dtype=np.uint16).tofile(
            place / "ids.bin"
        )
        file = TokenFile(place, len(own), used, 1, used, used)
        settings = {
            "out": f"{folder}/run",
            "dataset": {"batch_size": 8, "length": LENGTH},
            "model": {"pattern": "adad", "d_model": 64, "num_heads": 2, "d_ff": 128},
            "train": {"steps": steps, "save_every": 100, "log_every": 100},
        }
        train(resolve(ParTrainConfig, overrides=settings), Prepared(own, {"train": file}))
    return steps * 8 * LENGTH


def peak_of(what: str, num_tokens: int) -> dict[str, Any]:
    """Return the peak of a process of its own that fits or trains on so many tokens."""
    command = [sys.executable, "-m", "benchmarks.growth", what, str(num_tokens)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    print(f"{what}: {found}", flush=True)
    return found


# -- processes -------------------------------------------------------------------------------------


def processes(steps: int) -> dict[str, Any]:
    """Return the rates of one and of two processes of one thread, and of one with two."""
    rates = {
        "one": rate_of(1, 1, steps),
        "two": rate_of(2, 1, steps),
        "one_of_two_threads": rate_of(1, 2, steps),
    }
    return {f"{name}_tokens_per_second": rate for name, rate in rates.items()} | {
        "times_faster": Figure(rates["two"] / rates["one"], "x"),
        "threads_times_faster": Figure(rates["one_of_two_threads"] / rates["one"], "x"),
    }


def rate_of(num: int, threads: int, steps: int) -> float:
    """Return the tokens a second of so many processes, of all together."""
    half = steps // 2
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n".join(Texts(3000)))
        words = f"par train --data {text} --out {folder}/run --dataset.cache {folder}/cache"
        words += " --vocab_size 300 --valid_fraction 0 --test_fraction 0 --batch_size 32"
        words += " --model.pattern adadad --model.d_model 256 --model.d_ff 1024"
        words += f" --train.steps {steps} --train.log_every {half} --train.save_every {steps}"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [sys.executable, *launch, "-m", "deepenough", *words.split()],
            check=True,
            env=environment,
            capture_output=True,
        )
        records = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        rates = [r["tokens_per_second"] for r in records if r["kind"] == "train"]
    print(f"{num} processes, {threads} threads: {rates}", flush=True)
    return float(rates[-1])  # the first half warms up


def main(what: str, num_tokens: int) -> Mapping[str, float]:
    """Fit or train in this process and return how large it became."""
    torch.set_num_threads(1)
    torch.manual_seed(SEEDS[0])
    used = {"fit": fit, "training": training}[what](num_tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": used, "peak_mb": peak / 1e6}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
