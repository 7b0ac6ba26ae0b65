"""A pruned model as the draft of the full one, and in compiled code: what that does to the speed.

Takes the models that `python -m benchmarks prune_smollm2 runs=RUNS` has left. transformers
generates with the full model alone and with the pruned one as its assistant, in turns. A draft pays
only where the share of its tokens that are right exceeds what one of them costs of a full pass. The
same models also decode by themselves in the native backend, without drafts, where that fits: it
reads the full model's weights as they are stored, quantised, and what pruning has fitted in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.figures import interleaved, require
from benchmarks.prune_smollm2 import CORPUS
from benchmarks.shortcut_real import running_text
from deepenough.decoding.api import speculate
from deepenough.decoding.native_backend import load_library
from deepenough.hf.loading import load

QUICK = False
SEEDS = [0]


def measure(
    runs: str = "runs/prune-smollm2",
    model: str = "smollm2",
    shares: Sequence[float] = (0.83, 0.73),
    prompts: int = 4,
    new_tokens: int = 48,
    drafts: int = 2,
    rounds: int = 3,
    threads: int = 2,
) -> dict[str, Any]:
    """Return tokens a second with and without drafts, and whether all tokens are the same.

    Args:
        runs: Folder of `prune_smollm2`.
        model: Name or folder of the full model.
        shares: Shares of the layers' time that were kept.
        prompts: Prompts of 64 tokens of articles.
        new_tokens: Tokens after each.
        drafts: Tokens drafted at once.
        rounds: Rounds of all ways.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    full, tokenizer = load(model)
    text = "\n".join(running_text(tokenizer, CORPUS, "valid", 64 * prompts))
    ids = tokenizer(text, return_tensors="pt").input_ids[0, : 64 * prompts].view(prompts, 1, 64)
    remedy = "python -m benchmarks prune_smollm2 makes it."
    pruned: dict[str, Any] = {}
    for share in shares:
        folder = require(Path(runs) / f"time-{share}-replace" / "model", remedy)
        own = AutoModelForCausalLM.from_pretrained(folder).eval()
        pruned[f"keep_{round(100 * share)}"] = own
    for each in pruned.values():
        each.generation_config.num_assistant_tokens = drafts
        each.generation_config.num_assistant_tokens_schedule = "constant"
        each.generation_config.assistant_confidence_threshold = 0.0

    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}

    def generate(assistant: Any = None) -> torch.Tensor:
        return torch.cat(
            [full.generate(prompt, assistant_model=assistant, **options) for prompt in ids]
        )

    ways = {"full": generate} | {
        name: lambda a=assistant: generate(a) for name, assistant in pruned.items()
    }
    native: dict[str, Any] = {}
    if load_library() is not None:
        native = {
            f"native_{name}": speculate(each, "none", backend="native")
            for name, each in {"full": full, **pruned}.items()
        }
    ways |= {
        name: lambda m=each: [m.generate(prompt, **options) for prompt in ids]
        for name, each in native.items()
    }
    timings = interleaved(ways, rounds)
    expected = timings.results["full"][0]
    same = [torch.equal(timings.results[name][0], expected) for name in pruned]
    if not all(same):
        raise RuntimeError("the tokens with drafts are not those without")
    return {
        "tokens_per_second": {
            name: prompts * new_tokens / timings.best(name).value for name in ways
        },
        "times_as_fast_with_drafts": {name: timings.ratio("full", name) for name in pruned},
        "times_as_fast_natively": {
            name: timings.ratio("native_full", f"native_{name}") for name in pruned if native
        },
        "settings": {
            "model": model,
            "drafts": drafts,
            "threads": threads,
            "tokens": "all the same",
        },
    }
