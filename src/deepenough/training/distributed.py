"""Several processes that train one model: who does what, and how they agree.

Processes come from `torchrun` or `accelerate launch`; alone, everything here costs nothing.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import TorchDispatchMode

from deepenough.devices import find_device
from deepenough.errors import LostProcessError, UserError
from deepenough.training.config import TrainingConfig

T = TypeVar("T")

# The others wait while the first process prepares a corpus, which may be large.
_PATIENCE = timedelta(hours=12)

#: Ways of accelerate's own to divide a model.
_DIVIDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

#: What gloo says where a process no longer answers.
_SIGNS_OF_LOSS = ("closed by peer", "reset by peer", "broken pipe", "connection refused")


def make_accelerator(
    settings: TrainingConfig,
    may_skip: bool = True,
    may_divide: bool = True,
    device: str = "auto",
) -> Accelerator:
    """Return an accelerator: processes and precision from environment and settings, and a device.

    `may_skip` says that a batch may leave weights unused: a cluster of the adaptive softmax that no
    token falls into, the branches of a block that has been closed. `may_divide` says that all of
    the model is trained, so that there is something to divide.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    chosen = find_device(device)
    has_gpu = chosen.type != "cpu"
    if chosen.type in ("cuda", "xpu") and ":" in str(chosen):  # else accelerate takes the first
        torch.get_device_module(chosen).set_device(chosen)
    if settings.precision == "bf16" and not has_gpu:
        raise UserError("train.precision bf16 needs a GPU: leave it at auto.")
    is_half = settings.precision == "bf16" or (
        settings.precision == "auto" and chosen.type == "cuda"
    )
    join_again()
    # Accelerate keeps the precision of the first run of a process for all later ones.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Else accelerate takes processes without a GPU for so many single ones.
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
    if started > 1 and accelerator.distributed_type in _DIVIDED:
        raise UserError(
            "accelerate is set to divide models in a way of its own: leave that out, and give "
            "--parallel fsdp."
        )
    if settings.parallel == "fsdp":
        if not may_divide:
            raise UserError(
                "train.parallel fsdp divides a model that is trained; here a small part is, beside "
                "a whole model that every process needs: leave it at ddp."
            )
        if started == 1:
            raise UserError(
                "train.parallel fsdp divides a model among processes, and there is one: start "
                "several with torchrun, or leave it at ddp."
            )
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UserError(
                f"train.parallel fsdp needs a newer PyTorch than {torch.__version__}, which cannot "
                "divide weights that a batch leaves unused: update it, or leave it at ddp."
            )
    return accelerator


def join_again() -> None:
    """Form the group of processes that `torchrun` has restarted; else leave that to others.

    Its store is that of the first start, where torch would find the addresses of processes that are
    gone, and wait for them: a restart writes its own under another prefix.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_fresh = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    if attempt == "0" or is_fresh or dist.is_initialized():
        return
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise UserError(  # each machine counts its own restarts, so that counts may differ
            "Processes on several machines are restarted only with a store of their own: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun."
        )
    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    store = PrefixStore(f"restart-{attempt}", store)
    dist.init_process_group(store=store, rank=rank, world_size=world, timeout=_PATIENCE)


def is_main_process() -> bool:
    """Return whether this is the first process, where there need not be an accelerator."""
    return int(os.environ.get("RANK", "0")) == 0


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Run `function` in the first process and return its result, or raise its UserError, in all."""
    answer: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except UserError as refusal:
            answer[1] = refusal
    result, error = broadcast_object_list(answer)
    if error is not None:
        raise error
    return result


class SharedDropout(TorchDispatchMode):
    """On a CPU, drop in the rows of this process what one process would drop in them.

    Within it, dropout is drawn for the rows of all processes, to which they are dealt in turn.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.rank, self.world = place_among(accelerator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation of torch."""
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **kwargs or {})
        own, keep = args
        of_all = own.new_empty(len(own) * self.world, *own.shape[1:]).bernoulli_(keep)
        return own.copy_(of_all[self.rank :: self.world])


def mean_of_all(accelerator: Accelerator, values: Mapping[str, float]) -> dict[str, float]:
    """Return the means of values over all processes, in all."""
    gathered = from_all(accelerator, dict(values))
    return {name: sum(own[name] for own in gathered) / len(gathered) for name in values}


def agree(function: Callable[[], T]) -> T:
    """Run `function` in every process and return its result; a UserError of any is raised in all.

    Else those that go on would wait for the one that refuses.
    """
    answer: list[T] = []
    refusal: UserError | None = None
    try:
        answer.append(function())
    except UserError as error:
        refusal = error
    refusals = [refusal]
    if dist.is_initialized():
        refusals = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal)
    if (first := next(filter(None, refusals), None)) is not None:
        raise first
    return answer[0]


@contextlib.contextmanager
def losses_noticed() -> Iterator[None]:
    """Within it, that another process has ended is said in a sentence: a `LostProcessError`.

    The launcher ends this one, too; what it sends for that must not come before the sentence.
    """
    try:
        yield
    except RuntimeError as error:
        network = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
        if not (network or any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise LostProcessError(
            "Another process of this training has ended, and it cannot go on without."
        ) from error


def from_all(accelerator: Accelerator | None, value: T) -> list[T]:
    """Return what each process gives, in their order, in all."""
    return [value] if accelerator is None else gather_object([value])


def place_among(accelerator: Accelerator | None) -> tuple[int, int]:
    """Return this process's number, and how many processes there are."""
    if accelerator is None:
        return 0, 1
    return accelerator.process_index, accelerator.num_processes
