"""What skipped layers hold matters: agreement with the full model for the three fills.

    python benchmarks/exit_fill.py --model smollm2 --shortcuts runs/shortcut/shortcuts [--save]

At each threshold, with the same exits, the exiting model continues prompts by 128 tokens with each
way to fill the cache of skipped layers. Told apart:

- `agreement`: of the words it wrote, the share that the full model would have said at that place;
- `on_full_text`: of the full model's own text, the share of words the exits confirm, so that all
  fills are measured at the same places;
- `same_place`: words equal to the full model's text place by place, which ends soon after the
  first difference, and `first_difference`, the mean place of that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from exit_prompts import (
    add_arguments,
    agreement,
    end_tokens,
    load,
    make_exiting,
    make_prompts,
    new_tokens_of,
    options_of,
    padded,
)
from record import save_result

from deepenough.decoding.calibration import write
from deepenough.decoding.early_exit import KV_PROPAGATIONS
from deepenough.decoding.losses import full_words, losses_at
from deepenough.decoding.own_text import Written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.3])
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    model, tokenizer, shortcuts = load(arguments)
    prompts = make_prompts(tokenizer, arguments, arguments.prompts)
    fast = make_exiting(model, shortcuts, arguments, arguments.thresholds[0], "shortcut")
    engine = fast.decoding_engine
    full = write(engine, prompts, arguments.new_tokens, arguments.batch)
    expected = full_words(engine, full)
    rows = []
    for threshold in arguments.thresholds:
        for fill in KV_PROPAGATIONS:
            fast = make_exiting(model, shortcuts, arguments, threshold, fill)
            row = {
                "threshold": threshold,
                "fill": fill,
                **in_use(fast, prompts, full, arguments),
            }
            on_full = losses_at(fast.decoding_engine, fast.exit_rule, full, expected)
            row["on_full_text"] = 1 - float(on_full.losses_N.mean())
            row["layers_on_full_text"] = float(on_full.layers_N.mean())
            print(row, flush=True)
            rows.append(row)
    result = {
        "model": arguments.model,
        "prompts": len(prompts),
        "new_tokens": arguments.new_tokens,
        "layers": engine.num_layers,
        "exits": arguments.exits,
        "policy": arguments.policy,
        "shortlist": arguments.shortlist,
        "batch": arguments.batch,
        "fills": rows,
    }
    save_result(f"exit_fill_{Path(arguments.model).name.lower()}", result, arguments.save)


def in_use(
    fast: Any, prompts: list[list[int]], full: list[Written], arguments: argparse.Namespace
) -> dict[str, float]:
    options, ends = options_of(fast, arguments.new_tokens), end_tokens(fast)
    rows: list[list[int]] = []
    depths: list[int] = []
    began = time.perf_counter()
    for start in range(0, len(prompts), arguments.batch):
        given = padded(prompts[start : start + arguments.batch])
        output = fast.generate(**given, **options)
        rows += new_tokens_of(output, given["input_ids"].shape[1], ends)
        depth = fast.trace.depth
        depths += depth[depth > 0].tolist()
    seconds = time.perf_counter() - began
    same, firsts = [], []
    for row, text in zip(rows, full, strict=True):
        own, other = torch.tensor(row), text.ids_T[text.prompt :]
        length = min(len(own), len(other))
        equal = own[:length] == other[:length]
        same.append(float(equal.sum()) / max(len(own), len(other)))
        firsts.append(int(equal.long().cumprod(0).sum()))
    return {
        "agreement": agreement(fast.decoding_engine, prompts, rows),
        "same_place": statistics.fmean(same),
        "first_difference": statistics.fmean(firsts),
        "layers": statistics.fmean(depths),
        "tokens_per_second": sum(map(len, rows)) / seconds,
    }


if __name__ == "__main__":
    main()
