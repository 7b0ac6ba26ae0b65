"""How much memory a fit may use, and what that means for its passes."""

from __future__ import annotations

from pathlib import Path

import torch

from deepenough.errors import UserError
from deepenough.shortcut.pairs import Plan, pairs_of, plan_bytes, split_plan

_SHARE_OF_FREE = 0.7


def free_bytes(device: torch.device) -> float | None:
    """Memory that can be had on a device; None where nobody says."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def default_limit(device: torch.device) -> float:
    """Most of what is free, in bytes."""
    free = free_bytes(device)
    return float("inf") if free is None else _SHARE_OF_FREE * free


def plan_passes(plan: Plan, width: int, limit: float, map_bytes: int, on_disk: bool) -> list[Plan]:
    """As few passes over the text as the limit allows.

    In one pass, maps take the place of the statistics they come from. In several, the maps of
    earlier passes take memory too, unless they are kept on disk; `map_bytes` are those of one map.
    """
    if limit == float("inf"):
        return [plan]
    passes = split_plan(plan, width, limit)
    if len(passes) == 1 or on_disk:
        return passes
    maps = sum(1 for _ in pairs_of(plan)) * map_bytes
    smallest = plan_bytes({0: (1,)}, width)
    if limit - maps < 2 * smallest:
        raise UserError(
            f"The maps alone take {maps / 1e9:.1f} GB, and the memory limit is {limit / 1e9:.1f} "
            "GB: name a folder to resume from, where they are kept on disk, or fit maps to the "
            "last layer only."
        )
    return split_plan(plan, width, limit - maps)
