"""Compiled code decodes SmolLM2 from its GGUF file many times as fast as `generate`.

Prompts are the beginnings of WikiText-2 paragraphs and instructions, half of each; greedy, at most
128 new tokens each, ended by the model's own end token. All ways take turns on each prompt, prefill
included; a round is all prompts. Every way's tokens are compared with those of `generate` in fp32.
The native backend is measured with every instruction set of this CPU and in both arithmetics
(integer sums without rounding, fp32), without drafts, and once with lookup drafts. The floor is the
time of reading its weights once a token at the rate at which the same threads read a buffer of
that size. Where `xllamacpp` is installed, llama.cpp takes its turns too, with all that this CPU has
and its best number of threads, on the same file and on the same weights in Q4_0.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.decode_bench import write_q4_0
from benchmarks.decode_setup import (
    equality,
    greedy,
    load,
    make_prompts,
    new_tokens_of,
    padded,
)
from benchmarks.figures import Figure, Unavailable, interleaved
from deepenough.decoding.api import speculate
from deepenough.decoding.bench import llama_cpp
from deepenough.decoding.native_backend import NativeEngine
from deepenough.decoding.native_weights import kernel_names, load_library
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import stored_gguf
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
ROUNDS_OF_READING = 40


def measure(
    prompts: int = 8, new_tokens: int = 128, rounds: int = 3, threads: int = 2
) -> dict[str, Any]:
    """Time all ways to decode in turns; return rates, ratios, equality and the share of the floor.

    Args:
        prompts: Prompts that are timed.
        new_tokens: New tokens a prompt, at most.
        rounds: Rounds of timing.
        threads: Threads of torch and of the native backend.
    """
    if not kernel_names():
        raise Unavailable("the native backend is not compiled: python native/build.py")
    keep_freed_memory()
    full, tokenizer = load("smollm2", threads)
    options = greedy(full, new_tokens)
    ways: dict[str, Any] = {"generate": full, "torch": speculate(full, "none", backend="torch")}
    for kernels in kernel_names()[:-1]:  # without the portable ones, which are slower than torch
        for exact in (True, False):
            fast = speculate(full, "none", backend="native")
            engine = NativeEngine(adapt(full), exact=exact, kernels=kernels, threads=threads)
            fast.engine_and_state = engine, fast.engine_and_state[1]
            ways[f"{kernels}_{'integer' if exact else 'fp32'}"] = fast
    ways["lookup"] = speculate(full, "lookup", backend="native")

    def way(generator: Any) -> Any:
        def run(prompt: list[int]) -> list[int]:
            output = generator.generate(**padded([prompt]), **options)
            return new_tokens_of(output, len(prompt), full)[0]

        return run

    texts = make_prompts(tokenizer, prompts, "valid")
    timed = {name: way(each) for name, each in ways.items()}
    others: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("xllamacpp") is not None:
            others["llama_cpp"] = llama_cpp(str(stored_gguf(full)), new_tokens)
            write_q4_0(Path(folder) / "Q4_0.gguf")
            others["llama_cpp_q4_0"] = llama_cpp(f"{folder}/Q4_0.gguf", new_tokens)
        timed |= {name: lambda prompt, run=run: run(prompt, False) for name, run in others.items()}
        timings = interleaved(timed, rounds, texts)
        written = timings.results | {
            # llama.cpp tells its tokens only when asked, which takes time.
            name: [run(prompt, True) for prompt in texts]
            for name, run in others.items()
        }
    end = full.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    written = {  # without end tokens, which llama.cpp may leave out
        name: [[token for token in row if token not in ends] for row in rows]
        for name, rows in written.items()
    }
    expected = written["generate"]
    tokens = {name: sum(map(len, rows)) for name, rows in written.items()}
    found: dict[str, Any] = {}
    for name, rows in written.items():
        found[name] = {
            "tokens_per_second": timings.rate(name, tokens[name], "tokens/s"),
            "times_generate": timings.ratio("generate", name),
            **equality(full, texts, expected, rows),
        }
        for other in others:
            a_token = tokens[name] / tokens[other]  # texts that part may end elsewhere
            ratio = timings.ratio(other, name)
            found[name][f"times_{other}"] = Figure(
                ratio.value * a_token, "x", ratio.low * a_token, ratio.high * a_token
            )
    engine = ways["lookup"].decoding_engine
    library = load_library()
    size = library.de_model_bytes(engine.native.handle)
    rate = library.de_read_rate(ctypes.c_int64(size), threads, ROUNDS_OF_READING)
    fastest = f"{kernel_names()[0]}_integer"
    seconds = 1.0 / found[fastest]["tokens_per_second"].value
    return {
        **found,
        "floor": {
            "megabytes": size / 1e6,
            "gigabytes_per_second": rate / 1e9,
            "milliseconds": 1e3 * size / rate,
            "share_reached": size / rate / seconds,
        },
        "settings": {"prompts": len(texts), "rounds": rounds, "fastest": fastest},
    }
