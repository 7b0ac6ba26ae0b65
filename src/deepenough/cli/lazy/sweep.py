"""`deepenough lazy sweep`: BLEU for other steps, and for tokens that stop sooner or later."""

from __future__ import annotations

from deepenough.cli.parse import parse
from deepenough.lazy.sweep import LazySweep, sweep


def main(argv: list[str]) -> int:
    settings = parse(
        "lazy sweep",
        LazySweep,
        argv,
        description="BLEU over a grid of encoder and decoder steps, and over epsilons.",
        example="deepenough lazy sweep runs/lazy-multi30k --encoder_steps [6,9] --beams 1",
        positional=["run"],
    )
    print(f"{'sweep':8}{'encoder':>8}{'decoder':>8}{'epsilon':>8}{'BLEU':>8}", end="")
    print(f"{'depth':>8}{'GFLOPs':>10}{'seconds':>9}")
    for point in sweep(settings):
        where = f"{point['kind']:8}{point['encoder_steps']:8}{point['decoder_steps']:8}"
        cost = f"{point['encoder_flops'] / 1e9:10.2f}{point['encoder_seconds']:9.2f}"
        quality = f"{point['epsilon']:8.3g}{point['bleu']:8.2f}{point['encoder_depth']:8.2f}"
        print(where + quality + cost, flush=True)
    return 0
