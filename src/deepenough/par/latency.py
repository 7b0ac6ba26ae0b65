"""Latency of blocks and models on this machine, at the shape they will really have.

Timings of a shared machine are noisy upwards only, so the best of several rounds is taken, and the
things to compare take turns within a round: a slow moment hits all of them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepenough.par.config import ParConfig, with_pattern
from deepenough.par.derive import BlockCosts
from deepenough.par.flops import branch_flops, embedding_flops, head_flops
from deepenough.par.model import Memories, ParForCausalLM
from deepenough.par.pattern import ATTENTION, DENSE, IDENTITY, interleaved

logger = logging.getLogger(__name__)

# By how much the best whole pass may exceed the sum of the best of its parts.
_BUSY = 1.3


def interleaved_best(
    functions: Mapping[str, Callable[[], object]], rounds: int = 7, warmup: int = 1
) -> dict[str, float]:
    """Seconds of each function, best of `rounds`, taking turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            seconds = time.perf_counter() - started
            if turn >= warmup:
                best[name] = min(best[name], seconds)
    return best


def _tokens(config: ParConfig, lanes: int) -> Tensor:
    """One batch of ids. Frequent tokens are frequent, as the adaptive softmax expects them."""
    zipf = 1.0 / torch.arange(1, config.vocab_size + 1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(zipf, lanes * config.length, True, generator=generator)
    return draws.view(lanes, config.length)


def _stream(model: ParForCausalLM, lanes: int) -> tuple[Tensor, Memories]:
    """One batch and the memory it would meet in the middle of a text."""
    shape = (lanes, model.config.mem_len, model.config.d_model)
    memory = torch.zeros(shape, device=model.device, dtype=model.dtype)
    memories = tuple(memory if block.attends else None for block in model.blocks)  # type: ignore[union-attr]
    return _tokens(model.config, lanes).to(model.device), memories


def _seconds_now(device: torch.device) -> float:
    """The clock, once all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def forward_function(model: ParForCausalLM, lanes: int) -> Callable[[], object]:
    """One evaluation step, a segment of every lane with full memory, ready to be timed."""
    ids, memories = _stream(model, lanes)

    def run() -> None:
        with torch.inference_mode():
            model(ids, targets=ids, memories=memories)
        _seconds_now(model.device)

    model.eval()
    return run


def measure_block_costs(config: ParConfig, lanes: int, rounds: int = 15) -> BlockCosts:
    """Seconds of each kind of block and of the rest, in a forward pass at the real shape.

    Blocks of every kind are timed one by one within whole passes, where they find caches as they
    will find them in use, and the best round of each counts. Were the parts slowed by something
    else in every round, their sum would stay below the best whole pass: then it is said.
    """
    model = ParForCausalLM(with_pattern(config, interleaved(max(2, config.num_blocks)) + IDENTITY))
    times = _time_blocks(model, lanes, rounds)
    each = {
        kind: statistics.mean(
            seconds
            for block, seconds in zip(model.blocks, times.blocks, strict=True)
            if block.kind == kind
        )
        for kind in (ATTENTION, DENSE, IDENTITY)
    }
    if times.whole > _BUSY * (sum(times.blocks) + times.rest):
        logger.warning(
            "The costs of blocks were measured while the machine was busy (whole passes took %.2f "
            "times the sum of their parts): a budget rests on them, so measure when it is quiet.",
            times.whole / (sum(times.blocks) + times.rest),
        )
    return BlockCosts(each[ATTENTION], each[DENSE], each[IDENTITY], times.rest)


def count_block_costs(config: ParConfig, lanes: int) -> BlockCosts:
    """The same in FLOPs; the output layer is counted on tokens of a Zipf distribution."""
    ids = _tokens(config, lanes)
    keys = config.mem_len + config.length
    costs = {
        kind: float(branch_flops(config, kind, lanes, config.length, keys))
        for kind in (ATTENTION, DENSE, IDENTITY)
    }
    rest = float((embedding_flops(config, ids) + head_flops(config, ids.numel(), ids)).sum())
    return BlockCosts(costs[ATTENTION], costs[DENSE], costs[IDENTITY], rest)


def measure_blocks(model: ParForCausalLM, lanes: int, rounds: int = 5) -> Tensor:
    """Seconds of each block of a model; also kept in it, so that its traces tell them."""
    times = _time_blocks(model, lanes, rounds)
    model.block_seconds = torch.tensor(times.blocks, dtype=torch.float64)
    return model.block_seconds


class _Times(NamedTuple):
    """Best of several passes, in seconds."""

    blocks: list[float]
    rest: float
    """What a pass spent outside of its blocks."""
    whole: float


def _time_blocks(model: ParForCausalLM, lanes: int, rounds: int) -> _Times:
    model.eval()
    ids, memories = _stream(model, lanes)
    started: dict[nn.Module, float] = {}
    taken: dict[nn.Module, float] = {}

    def before(block: nn.Module, _: object) -> None:
        started[block] = _seconds_now(model.device)

    def after(block: nn.Module, *_: object) -> None:
        taken[block] = _seconds_now(model.device) - started[block]

    hooks = [block.register_forward_pre_hook(before) for block in model.blocks]
    hooks += [block.register_forward_hook(after) for block in model.blocks]
    passes = []
    try:
        with torch.inference_mode():
            for turn in range(1 + rounds):
                begun = _seconds_now(model.device)
                model(ids, targets=ids, memories=memories)
                whole = _seconds_now(model.device) - begun
                blocks = [taken[block] for block in model.blocks]
                if turn > 0:  # the first one warms up
                    passes.append(_Times(blocks, whole - sum(blocks), whole))
    finally:
        for hook in hooks:
            hook.remove()
    return _Times(
        blocks=[min(times) for times in zip(*(each.blocks for each in passes), strict=True)],
        rest=min(each.rest for each in passes),
        whole=min(each.whole for each in passes),
    )
