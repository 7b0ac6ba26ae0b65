"""`DepthTrace`: where each token or example stopped, which blocks ran, and what that cost.

Every mechanism returns one beside its predictions, whatever its way of deciding. Measuring needs
nothing else, which is why methods that have little in common fit one chart.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from deepenough.devices import exact


@dataclass(frozen=True)
class DepthTrace:
    """Units are tokens `[B, T]` or examples `[B]`; L is the number of blocks of the model."""

    depth: Tensor
    """How many blocks deep the unit went before it stopped: integers, one a unit."""

    ran: Tensor
    """Which blocks ran for the unit: booleans, `[*units, L]`."""

    flops: Tensor
    """What the unit cost, multiply-adds counted as two, the output head included: one a unit."""

    def __post_init__(self) -> None:
        if self.ran.shape[:-1] != self.depth.shape or self.flops.shape != self.depth.shape:
            raise ValueError(
                f"a trace needs depth and flops of one shape and ran with one axis more: got "
                f"{tuple(self.depth.shape)}, {tuple(self.flops.shape)}, {tuple(self.ran.shape)}"
            )

    def __getitem__(self, units: int | slice | Tensor) -> Self:
        """Return the trace of some of the units, chosen along the first axis."""
        return replace(self, depth=self.depth[units], ran=self.ran[units], flops=self.flops[units])

    @property
    def num_units(self) -> int:
        """Return how many tokens or examples the trace is of."""
        return self.depth.numel()

    @property
    def total_flops(self) -> float:
        """Return the FLOPs of all units together."""
        return float(exact(self.flops).sum())

    @property
    def mean_depth(self) -> float:
        """Return how deep a unit went, on average."""
        return float(exact(self.depth).mean())

    @property
    def mean_blocks(self) -> float:
        """Return the blocks that ran for a unit, on average."""
        return float(exact(self.ran).sum(-1).mean())

    @classmethod
    def join(cls, traces: list[Self]) -> Self:
        """Return the traces of several batches as one, units in a row."""
        if not traces:
            raise ValueError("there is no trace to join")
        return cls(
            depth=torch.cat([t.depth.flatten() for t in traces]),
            ran=torch.cat([t.ran.reshape(-1, t.ran.shape[-1]) for t in traces]),
            flops=torch.cat([t.flops.flatten() for t in traces]),
        )
