r"""Lossless decoding is up to twice as fast as transformers' `generate`, with the same tokens.

Prompts are the beginnings of WikiText-2 paragraphs and instructions, half of each; greedy, at most
128 new tokens each, ended by the model's own end token. All ways take turns on each prompt; a round
is all prompts. The tokens of every way are compared with those of `generate`. Draft heads and maps
come from these commands, on other texts:

    deepenough decode tune smollm2 --data wikitext-2-raw --out runs/tuned-first \
        --text.tokens 250000 --text.batch 64 --head.epochs 4
    deepenough decode tune smollm2 --data wikitext-2-raw --out runs/tuned --text.tokens 360000 \
        --text.batch 64 --head.epochs 2 --head.start runs/tuned-first --train.lr 7e-4
    deepenough decode tune stories15M --data wikitext-2-raw --out runs/tuned-stories \
        --text.tokens 60000 --text.batch 64 --head.epochs 3
    python -c "from benchmarks.decode_setup import *; train_small_gpt2('runs/gpt2-small/model')"
    deepenough decode tune runs/gpt2-small/model --data wikitext-2-raw --out runs/tuned-gpt2
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.decode_setup import (
    equality,
    greedy,
    load,
    make_loop,
    make_prompts,
    make_speculating,
    new_tokens_of,
    padded,
)
from benchmarks.figures import interleaved, require
from deepenough.decoding.backends import make_engine
from deepenough.decoding.draft_model import DraftModel
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
VARIANTS = {
    "smollm2": {"model": "smollm2", "tuned": "runs/tuned"},
    "stories15m": {"model": "stories15M", "tuned": "runs/tuned-stories"},
    "gpt2-small": {
        "model": "runs/gpt2-small/model",
        "tuned": "runs/tuned-gpt2",
        "assistant_layer": None,
    },
}
OURS = ("loop", "lookup_and_linear", "chosen")


def measure(
    model: str = "smollm2",
    tuned: str = "runs/tuned",
    prompts: int = 4,
    new_tokens: int = 128,
    rounds: int = 5,
    assistant_layer: int | None = 4,
    threads: int = 2,
) -> dict[str, Any]:
    """Time all ways to decode in turns; return rates, ratios, equality and accepted drafts.

    Args:
        model: Name or folder of the model.
        tuned: Folder of `deepenough decode tune`.
        prompts: Prompts that are timed.
        new_tokens: New tokens a prompt, at most.
        rounds: Rounds of timing.
        assistant_layer: Layer of transformers' `assistant_early_exit`; None to leave it out.
        threads: Threads of torch.
    """
    keep_freed_memory()
    head = DraftModel.from_pretrained(
        require(tuned, "the commands at the top of benchmarks/decode_speed.py make it.")
    )
    full, tokenizer = load(model, threads)
    options = greedy(full, new_tokens)
    ways = {
        "generate": (full, options),
        "prompt_lookup": (full, options | {"prompt_lookup_num_tokens": 2}),
        "loop": (make_loop(full), options),
        "lookup_and_linear": (make_speculating(full, head, ["lookup", "linear"], 2), options),
        "chosen": (make_speculating(full, head), options),
    }
    if assistant_layer is not None:
        ways["assistant_early_exit"] = full, options | {"assistant_early_exit": assistant_layer}

    def way(generator: Any, given: dict[str, Any]) -> Any:
        def run(prompt: list[int]) -> list[int]:
            output = generator.generate(**padded([prompt]), **given)
            return new_tokens_of(output, len(prompt), full)[0]

        return run

    texts = make_prompts(tokenizer, prompts, "valid")
    timings = interleaved({name: way(*each) for name, each in ways.items()}, rounds, texts)
    expected = timings.results["generate"]
    found: dict[str, Any] = {}
    for name, rows in timings.results.items():
        found[name] = {
            "tokens_per_second": timings.rate(name, sum(map(len, rows)), "tokens/s"),
            "times_generate": timings.ratio("generate", name),
            "times_loop": timings.ratio("loop", name),
            **equality(full, texts, expected, rows),
        }
        if name in OURS:
            found[name] |= drafts_of(ways[name][0], texts, options)
    return {
        **found,
        "milliseconds": breakdown(full, rounds),
        "head": {stage: head.meta.get(stage, {}) for stage in ("before", "after")},
        "linear": {"agreements": head.linear_drafter.meta["fit"]["agreements"]},
        "settings": {"prompts": len(texts), "rounds": rounds},
    }


def drafts_of(generator: Any, texts: list[list[int]], options: dict[str, Any]) -> dict[str, float]:
    """Return how many tokens are drafted and accepted in a pass of the model, on average."""
    outputs = [
        generator.generate(**padded([text]), **options, return_dict_in_generate=True)
        for text in texts
    ]
    passes = sum(output.passes for output in outputs)
    return {
        "drafted_a_pass": sum(output.drafted for output in outputs) / passes,
        "accepted_a_pass": sum(output.accepted for output in outputs) / passes,
    }


@torch.inference_mode()
def breakdown(model: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Return where a pass spends its time, for 1 to 4 tokens at once after 64: medians."""
    engine = make_engine(model)
    limit = model.config.vocab_size
    prompt = torch.arange(1, 65)[None].remainder(limit)
    result = {}
    for count in (1, 2, 3, 4):
        tokens = torch.arange(1, count + 1)[None].remainder(limit)
        engine.prefill(prompt, None, 64 + count)
        times: dict[str, list[float]] = {"embedding": [], "layers": [], "head": []}
        for _ in range(3 * rounds):
            marks = [time.perf_counter()]
            step = engine.start_step(tokens)
            marks.append(time.perf_counter())
            hidden = engine.run_layers(step, step.hidden, 0, engine.num_layers)
            marks.append(time.perf_counter())
            engine.head(engine.norm(hidden)).argmax(-1).tolist()
            marks.append(time.perf_counter())
            for name, start, end in zip(times, marks[:-1], marks[1:], strict=True):
                times[name].append(1e3 * (end - start))
        result[f"tokens_{count}"] = {n: round(statistics.median(t), 3) for n, t in times.items()}
    engine.release()
    return result
