"""A search of 32 blocks on WikiText-103 takes 1.6e18 operations, its result half of that.

Nothing is timed: tokens, operations and bytes are counted, by the package's own counters. The
setting is that of Transformer-XL's base model on eight GPUs (width 512, 256 streams of 192 tokens,
40,000 steps); the pattern that is found is taken to have attention and dense blocks in turns. Three
forward passes are counted for a training step. `state_gb` are weights, gradients and both of
AdamW's moments in float32, on every device (DDP); `saved_gb` is what a forward pass of one device's
streams keeps in float32 for the backward pass, counted on one stream.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.figures import Figure
from deepenough import ParConfig, ParForCausalLM
from deepenough.par.search import count_block_costs

QUICK = True
SEEDS = [0]

#: WikiText-103 has so many words in its training split, line ends included, and WikiText-2, whose
#: text is of the same kind, so many, which are so many pieces of the tokenizer used here.
WORDS_103, WORDS_2, PIECES_2 = 103_227_021, 2_088_628, 2_982_265
DEVICES, STREAMS, SEGMENT, PLAN_STEPS = 8, 256, 192, 40_000
PLAN = {
    "d_model": 512,
    "d_ff": 2048,
    "num_heads": 8,
    "mem_len": SEGMENT,
    "cutoffs": [250, 2500],
}


def measure() -> dict[str, Any]:
    """Count what a search, and the training of what it finds, take."""
    torch.manual_seed(SEEDS[0])
    tokens, per_step = WORDS_103 * PIECES_2 / WORDS_2, STREAMS * SEGMENT
    found: dict[str, Any] = {
        "million_tokens": tokens / 1e6,
        "tokens_per_step": per_step,
        "steps_per_epoch": tokens / per_step,
        "epochs": PLAN_STEPS * per_step / tokens,
        "file_gb": Figure(2 * tokens / 1e9, "GB"),
    }
    for name, pattern in (("search", "*" * 32), ("training", "ad" * 16)):
        config = ParConfig(12_000, length=SEGMENT, pattern=pattern, **PLAN)
        flops = DEVICES * training_flops(config, STREAMS // DEVICES)
        with torch.device("meta"):
            num = sum(weight.numel() for weight in ParForCausalLM(config).parameters())
        total = PLAN_STEPS * flops
        found[name] = {
            "million_parameters": num / 1e6,
            "tflop_per_step": Figure(flops / 1e12, "TFLOP"),
            "exaflop": Figure(total / 1e18, "EFLOP"),
            "state_gb": Figure(16 * num / 1e9, "GB"),
            "saved_gb": Figure(saved_bytes(config) * STREAMS / DEVICES / 1e9, "GB"),
            "gradients_gb": Figure(4 * num / 1e9, "GB"),
            "hours_at_one_tflop_per_second": Figure(total / DEVICES / 1e12 / 3600, "h"),
        }
    return found


def training_flops(config: ParConfig, streams: int) -> float:
    """Return the FLOPs of a step of a model whose blocks are given, or all computed (`*`)."""
    costs = count_block_costs(config, streams)
    of_blocks = {"a": costs.attention, "d": costs.dense, "-": costs.identity}
    of_blocks["*"] = costs.attention + costs.dense
    return 3 * (costs.rest + sum(of_blocks[kind] for kind in config.pattern))


def saved_bytes(config: ParConfig) -> int:
    """Return what one stream's forward pass keeps in float32 for the backward pass, weights not."""
    model = ParForCausalLM(config).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(config.vocab_size, (2, 1, SEGMENT))
    memories = model(ids[0], targets=ids[1]).memories
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids[0], targets=ids[1], memories=memories).loss
    del loss
    return sum(seen.values())
