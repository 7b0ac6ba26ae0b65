"""What tokens cost, in floating-point operations, multiply-adds counted as two, products only.

These are the counts of torch's `FlopCounterMode` in closed form, so a trace costs nothing to write.
Padding is no unit that anyone asked for: it costs nothing and goes nowhere in a trace, however a
batch was computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepenough.lazy.config import TRANSFORMER, LazyTransformerConfig
from deepenough.lazy.stack import Steps
from deepenough.trace import DepthTrace


def step_flops(config: LazyTransformerConfig, num_keys: int, num_source: int | None = None) -> int:
    """Of one token in one step that looks at so many tokens, and at so many of the source."""
    d = config.d_model
    maps = 4 * d * d + 2 * d * config.d_ff
    attention = 2 * d * num_keys
    if num_source is not None:
        maps += 2 * d * d
        attention += 2 * d * num_source
    return 2 * (maps + attention)


def source_flops(config: LazyTransformerConfig, num_source: int, num_steps: int) -> int:
    """Of one sentence's keys and values for all blocks, made once."""
    num_blocks = num_steps if config.mechanism == TRANSFORMER else 1
    return 2 * num_blocks * num_source * 2 * config.d_model**2


def head_flops(config: LazyTransformerConfig) -> int:
    """Of one token's scores of all words."""
    return 2 * config.d_model * config.vocab_size


def encoder_trace(
    config: LazyTransformerConfig, steps: Steps, real_BT: Tensor | None
) -> DepthTrace:
    each = step_flops(config, steps.ran.shape[1])
    return _trace(steps, each, torch.zeros(()), real_BT)


def decoder_trace(
    config: LazyTransformerConfig,
    steps: Steps,
    num_keys: int,
    num_source: int | None,
    real_BT: Tensor | None,
    with_head_BT: Tensor,
    makes_source: bool,
) -> DepthTrace:
    """`with_head_BT` says which tokens' scores were computed; `makes_source`, whether the keys and
    values of the source were, whose cost its target tokens share."""
    each = step_flops(config, num_keys, num_source)
    extra = with_head_BT.double() * head_flops(config)
    if makes_source and num_source is not None:
        num_steps, length = steps.ran.shape[2], steps.ran.shape[1]
        extra = extra + source_flops(config, num_source, num_steps) / length
    return _trace(steps, each, extra, real_BT)


def _trace(steps: Steps, each: int, extra: Tensor, real_BT: Tensor | None) -> DepthTrace:
    ran, depth = steps.ran, steps.depth
    flops = ran.sum(-1).double() * each + extra.to(ran.device)
    if real_BT is not None:
        real = real_BT.bool()
        ran, depth, flops = ran & real[..., None], depth * real, flops * real
    return DepthTrace(depth=depth, ran=ran, flops=flops)
