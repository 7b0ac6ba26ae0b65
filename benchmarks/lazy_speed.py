"""Speed of a Lazy Transformer: a training step against the machine's own rate, and beam search.

    python benchmarks/lazy_speed.py [--threads 1] [--save]

The training step is that of 512 units, 8 heads, 6 + 6 steps, a vocabulary of 32,010 and 16 pairs of
32 tokens, optimiser included. Its floating-point operations are those of its matrix products,
counted by torch while they run; divided by its time they are a rate, shown as a share of that of
one large product of float32 matrices measured in turns with the step. Beam search writes 64 tokens
with beam 4, with and without the cache, in turns; as no token ends a sentence, always all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from record import save_result
from torch.utils.flop_counter import FlopCounterMode

from deepenough.lazy import LazyTransformerConfig, LazyTransformerForConditionalGeneration
from deepenough.training.trainer import keep_freed_memory

PAIRS, LENGTH, VOCABULARY = 16, 32, 32_010
MATRIX = 2048
WRITTEN = 64
SENTENCES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mechanisms", nargs="*", default=["lazy", "universal"])
    parser.add_argument("--no-search", action="store_true", help="measure only the training step")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    result: dict[str, Any] = {
        "training": [training(mechanism, arguments.rounds) for mechanism in arguments.mechanisms]
    }
    if not arguments.no_search:
        result["search"] = [search(sentences, rounds=3) for sentences in SENTENCES]
    save_result("lazy_speed", result, arguments.save)


def training(mechanism: str, rounds: int) -> dict[str, Any]:
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
    step()
    torch.mm(matrix, matrix, out=out)
    # In turns, so that both meet the same machine.
    times = [
        (seconds(step), seconds(lambda: torch.mm(matrix, matrix, out=out))) for _ in range(rounds)
    ]
    shares = [flops / a / (2 * MATRIX**3 / b) for a, b in times]
    return {
        "mechanism": mechanism,
        "parameters": model.num_parameters(),
        "step_seconds": statistics.median(a for a, _ in times),
        "step_gflop": flops / 1e9,
        "step_gflops": flops / statistics.median(a for a, _ in times) / 1e9,
        "matmul_gflops": 2 * MATRIX**3 / statistics.median(b for _, b in times) / 1e9,
        "share": statistics.median(shares),
        "shares": shares,
    }


@torch.inference_mode()
def search(sentences: int, rounds: int) -> dict[str, Any]:
    model = make_model("lazy").eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (sentences, LENGTH), generator=generator)
    fixed: dict[str, Any] = {"num_beams": 4, "do_sample": False, "max_new_tokens": WRITTEN}
    fixed["attention_mask"] = torch.ones_like(ids)
    written = {}
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for cached in times:
            started = time.perf_counter()
            written[cached] = model.generate(ids, use_cache=cached, **fixed)
            times[cached].append(time.perf_counter() - started)
    assert written[True].shape[1] == WRITTEN + 1, "a sentence ended"
    assert torch.equal(written[True], written[False]), "the cache changes what is written"
    ratios = [b / a for a, b in zip(times[True], times[False], strict=True)]
    return {
        "tokens": WRITTEN,
        "beams": 4,
        "sentences": sentences,
        "cached_seconds": statistics.median(times[True]),
        "uncached_seconds": statistics.median(times[False]),
        "times_faster": statistics.median(ratios),
        "ratios": ratios,
    }


def make_model(mechanism: str) -> LazyTransformerForConditionalGeneration:
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


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
