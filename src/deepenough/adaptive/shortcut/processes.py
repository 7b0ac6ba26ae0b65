"""Several processes that fit together, started by `torchrun` or `accelerate launch`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist


class Processes(NamedTuple):
    """This process and how many there are."""

    rank: int = 0
    world: int = 1

    def least(self, value: float) -> float:
        """The least of what the processes have, so that all go on with the same."""
        if self.world == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        answer = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return float(answer)

    def wait(self) -> None:
        """Until all processes are here."""
        self.least(0.0)


@contextmanager
def together() -> Iterator[Processes]:
    """Join the processes that were started with this one, unless they have met already."""
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    dist.init_process_group()
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
