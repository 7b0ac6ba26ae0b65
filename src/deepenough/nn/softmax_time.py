"""Seconds of the real output layer for several cutoffs, side by side.

Each is torch's `AdaptiveLogSoftmaxWithLoss` (or, without cutoffs, a full softmax), forward and
backward on random hidden states. The batch holds every word as often as its share says, to the
nearest token, so no layer is lucky in what it is given. The layers take turns in changing order and
the fastest turn of each counts, so that whatever else the machine does falls on none of them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from deepenough.nn.softmax_cost import LayerShape

_MAX_OUTPUTS = 1 << 25
"""Outputs (rows times words) of a cluster up to which a layer is timed: about 0.5 GB of buffers."""

_MIN_TURNS = 3
_PATIENCE = 15.0
"""Seconds of timing after which no more turns are begun."""


def time_partitions(
    masses: npt.ArrayLike,
    cutoffs: Sequence[Sequence[int]],
    shape: LayerShape,
    rounds: int = 25,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[float]:
    """Seconds of a training step for each list of cutoffs, the fastest of `rounds` turns.

    Fewer turns are taken if that takes long. `track` may wrap them to show their progress.
    """
    shares = np.asarray(masses, dtype=np.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [_layer(len(shares), list(cuts), shape) for cuts in cutoffs]
        hidden = torch.randn(shape.batch_tokens, shape.d_model)
        targets = _typical_batch(shares, shape.batch_tokens)
    for layer in layers:
        _step(layer, hidden, targets)  # the first one pays for allocations
    seconds = [float("inf")] * len(layers)
    order = random.Random(0)
    deadline = time.perf_counter() + _PATIENCE
    for turn in track(range(rounds)):
        if turn >= _MIN_TURNS and time.perf_counter() > deadline:
            break
        for number in order.sample(range(len(layers)), len(layers)):
            seconds[number] = min(seconds[number], _step(layers[number], hidden, targets))
    return seconds


def can_be_timed(masses: npt.ArrayLike, cutoffs: Sequence[int], shape: LayerShape) -> bool:
    """Whether the layer's buffers are small enough to try it on any machine."""
    shares = np.asarray(masses, dtype=np.float64)
    shares = shares / shares.sum()
    bounds = [*cutoffs, len(shares)]
    outputs = [shape.batch_tokens * bounds[0]]
    for start, stop in itertools.pairwise(bounds):
        rows = shape.batch_tokens * shares[start:stop].sum()
        outputs.append(int(rows * (stop - start)))
    return max(outputs) <= _MAX_OUTPUTS


def _typical_batch(shares: npt.NDArray[np.float64], batch_tokens: int) -> torch.Tensor:
    """Words at equally spaced quantiles, in random order."""
    running = np.cumsum(shares)
    quantiles = (np.arange(batch_tokens) + 0.5) / batch_tokens * running[-1]
    words = torch.from_numpy(np.searchsorted(running, quantiles, side="right"))
    return words[torch.randperm(batch_tokens)]


def _layer(vocab_size: int, cutoffs: list[int], shape: LayerShape) -> nn.Module:
    if not cutoffs:
        return nn.Linear(shape.d_model, vocab_size, bias=False)
    return nn.AdaptiveLogSoftmaxWithLoss(
        shape.d_model, vocab_size, cutoffs, div_value=shape.div_value
    )


def _step(layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    start = time.perf_counter()
    if isinstance(layer, nn.AdaptiveLogSoftmaxWithLoss):
        loss = layer(hidden, targets).loss
    else:
        loss = F.cross_entropy(layer(hidden), targets)
    loss.backward()
    return time.perf_counter() - start
