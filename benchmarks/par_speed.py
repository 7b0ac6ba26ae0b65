"""Training a SuperNet reaches 45 % of the rate at which the machine multiplies large matrices.

The setting is that of the first PAR code. The rate is that of a 2048^3 float32 `torch.mm` in the
same run, by the library that training multiplies with; FLOPs are those of torch's counter, both
branches computed. `mkl` has both by the library that torch itself chooses. Evaluation is in tokens
a second; memory is the peak of this process.
"""

from __future__ import annotations

import resource
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures import Figure, interleaved
from deepenough import ParConfig, ParForCausalLM
from deepenough.nn.products import fast_products
from deepenough.training.trainer import keep_freed_memory

QUICK = True
SEEDS = [0]
STREAMS, LENGTH, STEPS = 32, 32, 20


def measure(rounds: int = 15, threads: int = 2) -> dict[str, Any]:
    """Time training, evaluation and one large matrix product in turns; return rates and memory."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    torch.manual_seed(SEEDS[0])
    config = ParConfig(vocab_size=12000, mem_len=16, length=LENGTH, cutoffs=[250, 2500])
    model = ParForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zipf = 1.0 / torch.arange(1, config.vocab_size + 1)
    ids = torch.multinomial(zipf, (STEPS + 1) * STREAMS * LENGTH, True).view(-1, STREAMS, LENGTH)
    parameters = list(model.parameters())
    memories = None

    def train_step(index: int) -> None:
        nonlocal memories
        output = model(ids[index], targets=ids[index + 1], memories=memories)
        memories = output.memories
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def train_round() -> None:
        model.train()
        for index in range(STEPS):
            train_step(index)

    @torch.no_grad()
    def evaluation_round() -> None:
        model.eval()
        state = None
        for index in range(STEPS):
            state = model(ids[index], targets=ids[index + 1], memories=state).memories

    train_round()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        train_step(0)
    flops = counter.get_total_flops()
    left, right = torch.randn(2, 2048, 2048)
    timings = interleaved(
        {
            "matmul": fast_products()(lambda: torch.mm(left, right)),
            "train": fast_products()(train_round),
            "evaluation": fast_products()(evaluation_round),
            "mkl_matmul": lambda: torch.mm(left, right),
            "mkl_train": train_round,
        },
        rounds,
    )
    tokens = STEPS * STREAMS * LENGTH

    def rates(prefix: str = "") -> dict[str, Figure]:
        # Rate of training over rate of the product, from the ratio of their times.
        times = timings.ratio(f"{prefix}matmul", f"{prefix}train")
        work = flops * STEPS / (2 * 2048**3)
        assert times.low is not None and times.high is not None
        return {
            "matmul_gflops": timings.rate(f"{prefix}matmul", 2 * 2048**3 / 1e9, "GFLOP/s"),
            "steps_per_second": timings.rate(f"{prefix}train", STEPS, "steps/s"),
            "share_of_matmul_rate": Figure(
                work * times.value, "x", work * times.low, work * times.high
            ),
        }

    return {
        **rates(),
        "mkl": rates("mkl_"),
        "faster_than_mkl": timings.ratio("mkl_train", "train"),
        "gflop_per_step": flops / 1e9,
        "evaluation_tokens_per_second": timings.rate("evaluation", tokens, "tokens/s"),
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "settings": {"rounds": rounds},
    }
