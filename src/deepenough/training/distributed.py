"""Several processes that train one model: who does what, and how they agree.

Processes come from `torchrun` or `accelerate launch`; alone, everything here costs nothing. What
one process decides for all travels as JSON, so nothing is pickled on the way either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from deepenough.errors import UserError
from deepenough.training.config import TrainingConfig

T = TypeVar("T")

# The others wait while the first process prepares a corpus, which may be large.
_PATIENCE = timedelta(hours=12)


def make_accelerator(settings: TrainingConfig, may_skip: bool = True) -> Accelerator:
    """Return an accelerator: processes, device and precision from environment and settings.

    `may_skip` says that a batch may leave weights unused: a cluster of the adaptive softmax that no
    token falls into, the branches of a block that has been closed.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    has_gpu = torch.accelerator.is_available()
    if settings.precision == "bf16" and not has_gpu:
        raise UserError("train.precision bf16 needs a GPU: leave it at auto.")
    is_half = settings.precision == "bf16" or (
        settings.precision == "auto" and torch.cuda.is_available()
    )
    # Accelerate keeps the precision of the first run of a process for all later ones.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Else accelerate takes the processes of a machine without a GPU for so many single ones.
        cpu=not has_gpu,
        mixed_precision="bf16" if is_half else "no",
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=may_skip),
            InitProcessGroupKwargs(timeout=_PATIENCE),
        ],
    )
    if accelerator.num_processes != (started := int(os.environ.get("WORLD_SIZE", "1"))):
        raise UserError(
            f"{started} processes were started, but they cannot train together on "
            f"{accelerator.device}: start one."
        )
    return accelerator


def is_main_process() -> bool:
    """Return whether this is the first process, where there need not be an accelerator."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Run `function` in the first process and return its result, or raise its UserError, in all.

    The result must be something that JSON can say.
    """
    if accelerator.num_processes == 1:
        return function()
    answer = b""
    if accelerator.is_main_process:
        try:
            answer = json.dumps({"result": function()}).encode()
        except UserError as error:
            answer = json.dumps({"error": str(error)}).encode()
    content = json.loads(_broadcast(answer, accelerator))
    if "error" in content:
        raise UserError(content["error"])
    result: T = content["result"]
    return result


def from_all(accelerator: Accelerator | None, value: T) -> list[T]:
    """Return what each process gives (something that JSON can hold), in their order, in all."""
    if accelerator is None or accelerator.num_processes == 1:
        return [value]
    own = json.dumps(value).encode()
    senders = range(accelerator.num_processes)
    return [json.loads(_broadcast(own, accelerator, sender)) for sender in senders]


def place_among(accelerator: Accelerator | None) -> tuple[int, int]:
    """Return this process's number, and how many processes there are."""
    if accelerator is None:
        return 0, 1
    return accelerator.process_index, accelerator.num_processes


def _broadcast(content: bytes, accelerator: Accelerator, sender: int = 0) -> bytes:
    size = torch.tensor(len(content), device=accelerator.device)
    torch.distributed.broadcast(size, sender)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if accelerator.process_index == sender:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data = data.to(accelerator.device)
    torch.distributed.broadcast(data, sender)
    return bytes(data.cpu().numpy())


def mean_over(accelerator: Accelerator, value: Tensor) -> float:
    """Return the mean of a number over all processes."""
    if accelerator.num_processes > 1:
        value = accelerator.reduce(value, reduction="mean")
    return float(value)


def all_streams(accelerator: Accelerator, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the streams (first axis) of all processes in their order, from each one's own."""
    if accelerator.num_processes == 1:
        return dict(state)
    return {name: accelerator.gather(streams.contiguous()) for name, streams in state.items()}


def own_streams(accelerator: Accelerator, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's streams out of those of all processes."""
    rank, world = accelerator.process_index, accelerator.num_processes
    return {name: streams.chunk(world)[rank] for name, streams in state.items()}
