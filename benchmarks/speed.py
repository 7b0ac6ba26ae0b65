"""Speed of SuperNet training and evaluation at the first PAR code's setting, and its memory.

    python benchmarks/speed.py [--save]

Training is given as a share of the fp32 matrix-product rate this machine reaches in the same run
(2048^3 `torch.mm`), both taking turns, best of several rounds; FLOPs are those of torch's counter,
both branches computed. Evaluation is in tokens a second.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from record import save_result
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepenough import ParConfig, ParForCausalLM
from deepenough.training.trainer import keep_freed_memory

LANES, LENGTH, STEPS = 32, 32, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    config = ParConfig(vocab_size=12000, mem_len=16, length=LENGTH, cutoffs=[250, 2500])
    model = ParForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zipf = 1.0 / torch.arange(1, config.vocab_size + 1)
    ids = torch.multinomial(zipf, (STEPS + 1) * LANES * LENGTH, True).view(-1, LANES, LENGTH)
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
    best = {"matmul": float("inf"), "train": float("inf"), "evaluation": float("inf")}
    for _ in range(arguments.rounds):
        for name, function in (
            ("matmul", lambda: torch.mm(left, right)),
            ("train", train_round),
            ("evaluation", evaluation_round),
            ("matmul", lambda: torch.mm(left, right)),
        ):
            started = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - started)
    rate = 2 * 2048**3 / best["matmul"]
    steps_per_second = STEPS / best["train"]
    result = {
        "threads": arguments.threads,
        "matmul_gflops": rate / 1e9,
        "gflop_per_step": flops / 1e9,
        "steps_per_second": steps_per_second,
        "share_of_matmul_rate": flops * steps_per_second / rate,
        "evaluation_tokens_per_second": STEPS * LANES * LENGTH / best["evaluation"],
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    save_result("speed", result, arguments.save)


if __name__ == "__main__":
    main()
