"""A Lazy Transformer trains near the machine's own rate, and its cache makes beam search faster.

The training step is that of 512 units, 8 heads, 6 + 6 steps, a vocabulary of 32,010 and 16 pairs of
32 tokens, optimiser included. Its floating-point operations are those of its matrix products,
counted by torch while they run; divided by its time they are a rate, shown as a share of that of
one large product of float32 matrices timed in turns with the step. Beam search writes 64 tokens
with beam 4, with and without the cache, in turns; no token ends a sentence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures import Figure, interleaved
from deepenough.lazy.modeling import LazyTransformerConfig, LazyTransformerForConditionalGeneration
from deepenough.training.trainer import keep_freed_memory

QUICK = True
SEEDS = [0]
PAIRS, LENGTH, VOCABULARY = 16, 32, 32_010
MATRIX = 2048
WRITTEN = 64
SENTENCES = (1, 4, 16)


def measure(rounds: int = 7, threads: int = 2) -> dict[str, Any]:
    """Time training steps and beam search; return seconds, rates and ratios."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    return {
        "training": {name: training(name, rounds) for name in ("lazy", "universal")},
        "search": {f"sentences_{number}": search(number, rounds=3) for number in SENTENCES},
        "settings": {"rounds": rounds, "tokens": WRITTEN, "beams": 4},
    }


def training(mechanism: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of a training step and its share of a large product's rate."""
    model = make_model(mechanism).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    ids, targets = (
        torch.randint(4, VOCABULARY, (PAIRS, LENGTH), generator=generator) for _ in range(2)
    )
    mask = torch.ones_like(ids)

    def step() -> None:
        model(input_ids=ids, attention_mask=mask, targets=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_total_flops()
    matrix = torch.randn(MATRIX, MATRIX)
    out = torch.empty_like(matrix)
    timings = interleaved(
        {"step": step, "matmul": lambda: torch.mm(matrix, matrix, out=out)}, rounds
    )
    times = timings.ratio("matmul", "step")
    work = flops / (2 * MATRIX**3)
    assert times.low is not None and times.high is not None
    return {
        "parameters": model.num_parameters(),
        "step_seconds": timings.best("step"),
        "step_gflop": flops / 1e9,
        "matmul_gflops": timings.rate("matmul", 2 * MATRIX**3 / 1e9, "GFLOP/s"),
        "share": Figure(work * times.value, "x", work * times.low, work * times.high),
    }


@torch.inference_mode()
def search(sentences: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of beam search with and without the cache; both must write the same."""
    model = make_model("lazy").eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (sentences, LENGTH), generator=generator)
    fixed: dict[str, Any] = {"num_beams": 4, "do_sample": False, "max_new_tokens": WRITTEN}
    fixed["attention_mask"] = torch.ones_like(ids)
    functions = {
        "cached": lambda: model.generate(ids, use_cache=True, **fixed),
        "uncached": lambda: model.generate(ids, use_cache=False, **fixed),
    }
    timings = interleaved(functions, rounds, warmup=0)
    cached, uncached = (timings.results[name][0] for name in functions)
    assert cached.shape[1] == WRITTEN + 1, "a sentence ended"
    assert torch.equal(cached, uncached), "the cache changes what is written"
    return {
        "cached_seconds": timings.best("cached"),
        "uncached_seconds": timings.best("uncached"),
        "times_faster": timings.ratio("uncached", "cached"),
    }


def make_model(mechanism: str) -> LazyTransformerForConditionalGeneration:
    """Return a model of the measured size with new weights."""
    torch.manual_seed(0)
    config = LazyTransformerConfig(
        vocab_size=VOCABULARY,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        encoder_steps=6,
        decoder_steps=6,
        mechanism=mechanism,
        dropout=0.1,
        label_smoothing=0.1,
    )
    return LazyTransformerForConditionalGeneration(config)
