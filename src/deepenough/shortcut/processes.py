"""Several processes that fit together, started by `torchrun` or `accelerate launch`."""

from __future__ import annotations

import os
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


def meet() -> Processes:
    """Join the processes that were started with this one, unless they have met already.

    They stay together after that: what follows, another fit or a training, finds them so, and a
    group that is left cannot be joined again.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        dist.init_process_group()
    return Processes(dist.get_rank(), dist.get_world_size())
