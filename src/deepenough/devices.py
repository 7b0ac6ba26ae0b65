"""Where models run: the device and number format of a command, and what devices can and cannot do.

`--device` and `--dtype` of a command hold while it runs (`placed`), and every model that is loaded
or trained within it goes there. From Python nothing is placed: a model is where its owner put it,
and maps, drafts and batches follow it.

Apple's GPUs have no float64 (`has_float64`): sums that need it are made on the CPU there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from deepenough.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16", "float64")

M = TypeVar("M", bound=nn.Module)


class Placement(NamedTuple):
    """Where the models of a command go."""

    device: torch.device
    dtype: torch.dtype | None = None
    """Number format of the weights; None for the one that they are loaded in."""


_placement: Placement | None = None


@contextmanager
def placed(device: str = "auto", dtype: str | None = None) -> Iterator[None]:
    """Let models that are loaded within go to a device, and have a number format if one is given.

    Within another one, `auto` is the device of that.
    """
    global _placement
    before, where = _placement, find_device(device)
    _placement = Placement(where, find_dtype(dtype, where) if dtype else None)
    try:
        yield
    finally:
        _placement = before


def move_to_device(model: M) -> M:
    """Return the model on the device of the command that is running; elsewhere as it is."""
    if _placement is None:
        return model
    model.to(_placement.device)
    return model if _placement.dtype is None else model.to(_placement.dtype)


def find_device(name: str = "auto") -> torch.device:
    """Return the device of this name, or refuse one that is not there.

    `auto` is that of the running command, else the GPU if there is one, else the CPU. Processes
    that were started together have one GPU each.
    """
    if name == "auto" and _placement is not None:
        return _placement.device
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        device = gpu or torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError:
            known = ", ".join(("auto", "cpu", *((gpu.type,) if gpu else ())))
            raise UserError(f"There is no kind of device {name!r}: give one of {known}.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count() if gpu and gpu.type == device.type else 0
    if (device.index or 0) >= count:
        others = "alone" if gpu is None else f"and {gpu.type}"
        there = f"the CPU {others}" + (f" 0 to {count - 1}" if count else "")
        raise UserError(f"The device {name} is not there: torch finds {there} on this machine.")
    if ":" not in str(device) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % count)
    return device


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that a model takes its inputs on.

    Of one that a `device_map` has laid over several, whose weights may wait on disk, the hooks of
    accelerate know it.
    """
    if "hf_device_map" in vars(model):
        for module in model.modules():
            device = getattr(vars(module).get("_hf_hook"), "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device


def find_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """Return the number format of this name, or refuse one that a device does not have.

    The device is by default that of the running command, if one is running.
    """
    if name not in DTYPES:
        raise UserError(f"The dtype {name!r} is unknown: choose one of {', '.join(DTYPES)}.")
    if device is None and _placement is not None:
        device = _placement.device
    if name == "float64" and device is not None and not has_float64(device):
        raise UserError(f"The device {device.type} has no float64: give float32, or --device cpu.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64, which Apple's GPUs do not."""
    return device.type != "mps"


def sums_device(device: torch.device) -> torch.device:
    """Return where sums in float64 are made for tensors on a device: there, or on the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def exact(values: Tensor) -> Tensor:
    """Return values in float64, where they are or, if there is none there, on the CPU."""
    # First the copy, then the format: a device without float64 cannot change to it.
    return values.to(sums_device(values.device)).to(torch.float64)


def to_device(batch: Tensor, device: torch.device | None) -> Tensor:
    """Return a batch on a device; a copy to CUDA goes on while Python prepares what follows.

    Without a device it stays where it is.
    """
    if device is None:
        return batch
    if device.type != "cuda" or batch.device.type != "cpu":
        return batch.to(device)
    # Only page-locked memory is copied without the program waiting for it.
    return batch.pin_memory().to(device, non_blocking=True)


def free_memory(device: torch.device) -> float:
    """Return the memory that is free on a device, in bytes; infinity if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return float("inf")
