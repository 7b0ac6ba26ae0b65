"""Floating-point operations of pondering, multiply-adds counted as two, matrix products only.

In closed form, and equal to torch's own `FlopCounterMode` on the architectures that the tests name.
An encoder whose attention does more than compare queries with keys (DeBERTa's disentangled terms)
costs somewhat more than is told here.
"""

from __future__ import annotations

from torch import nn

from deepenough.ponder.stack import LayerStack


def linear_flops(module: nn.Module) -> int:
    """Of all linear maps in a module, each applied once to one vector."""
    maps = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return 2 * sum(part.weight.numel() for part in maps)


class StackFlops:
    """What one example costs in a batch padded to a length."""

    def __init__(self, stack: LayerStack, width: int) -> None:
        known: dict[nn.Module, int] = {}
        for layer in stack.layers:
            known.setdefault(layer, linear_flops(layer))
        self._layers = [known[layer] for layer in stack.layers]
        self._width = width
        self._stack = stack

    def begin(self, length: int) -> int:
        """Of what the encoder does before its first layer."""
        return length * 2 * sum(part.weight.numel() for part in self._stack.preparing)

    def layer(self, index: int, length: int) -> int:
        """Of one pass: the maps of every token, scores with every other, and sums over values."""
        return length * self._layers[index] + 4 * length * length * self._width
