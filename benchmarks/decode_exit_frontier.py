"""Early exit in compiled code: tokens a second against agreement with the full model.

SmolLM2 from its GGUF file, or stories15M. All ways take turns on each prompt, greedy: the native
loop without exits, and exits at one layer at several thresholds. Agreement
is the share of written tokens that the full model would have chosen at their place. Where no exit
pays, none of these points is above the loop without exits, and that is the result.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decode_setup import DRAFT_VOCAB, agreement, greedy, load, new_tokens_of, padded
from benchmarks.decode_setup import make_prompts as wikitext_prompts
from benchmarks.figures import interleaved
from deepenough.data.corpus import open_corpus
from deepenough.decoding.api import early_exit, speculate
from deepenough.shortcut.modeling import Shortcuts

QUICK = False
SEEDS = [0]
VARIANTS = {"smollm2": {}, "stories15m": {"model": "stories15M"}}


def measure(
    model: str = "smollm2",
    prompts: int = 8,
    new_tokens: int = 128,
    rounds: int = 3,
    thresholds: tuple[float, ...] = (0.95, 0.9, 0.8, 0.6, 0.3),
    fill: str = "shortcut",
    texts: int = 200,
    threads: int = 2,
) -> dict[str, Any]:
    """Fit maps on WikiText-2, then time all ways in turns.

    Args:
        model: Name or folder of the model.
        prompts: Prompts that are timed.
        new_tokens: New tokens a prompt, at most.
        rounds: Rounds of timing.
        thresholds: Thresholds of the gap between the two best probabilities.
        fill: What later tokens find in skipped layers: shortcut, copy or deferred.
        texts: Paragraphs that the maps are fitted on.
        threads: Threads of torch and of the native backend.
    """
    full, tokenizer = load(model, threads)
    lines = [line for line in open_corpus("wikitext-2-raw").lines("train") if len(line) > 200]
    shortcuts = Shortcuts.fit(full, tokenizer, lines[:texts])
    ways: dict[str, Any] = {"plain": speculate(full, "none")}
    vocab = torch.arange(min(DRAFT_VOCAB, full.config.vocab_size))
    exits: list[int] | None = None  # the layer that saves most at the first threshold, for all
    given: dict[str, Any] = {"kv_propagation": fill, "exit_vocab": vocab}
    for threshold in thresholds:
        fast = early_exit(full, shortcuts, threshold, exit_layers=exits, **given)
        exits = exits or list(fast.exit_rule.layers)
        ways[f"exit_{threshold}"] = fast
    options, layers = greedy(full, new_tokens), dict.fromkeys(ways, 0.0)

    def way(name: str) -> Any:
        def run(prompt: list[int]) -> list[int]:
            output = ways[name].generate(**padded([prompt]), **options)
            if name.startswith("exit"):
                layers[name] = float(ways[name].trace.mean_blocks)
            return new_tokens_of(output, len(prompt), full)[0]

        return run

    inputs = wikitext_prompts(tokenizer, prompts, "valid")
    timings = interleaved({name: way(name) for name in ways}, rounds, inputs)
    engine = ways["plain"].decoding_engine
    found: dict[str, Any] = {}
    for name, rows in timings.results.items():
        tokens = sum(map(len, rows))
        seconds = [each / tokens for each in timings.seconds[name]]
        found[name] = {
            "tokens_per_second": timings.rate(name, tokens, "tokens/s"),
            "times_plain": min(timings.seconds["plain"])
            / sum(map(len, timings.results["plain"]))
            / min(seconds),
            "agreement": agreement(engine, inputs, rows),
            "layers_of_last_prompt": layers[name] or float(engine.num_layers),
        }
    return {**found, "settings": {"exits": exits, "fill": fill, "backend": engine.backend}}
