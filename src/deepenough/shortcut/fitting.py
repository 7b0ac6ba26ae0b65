"""Collect the statistics of a model: one pass over the text, from which all maps follow.

Whatever the number of processes, or of kills and resumptions in between, they are the same. A fit
that is given a folder goes on where it was killed: each process keeps there its sums so far,
`statistics-RANK.safetensors`, whose header says what is fitted and how far it has come in which
texts. Texts are not kept: those that were read already are read again, without running the model,
and must be the same.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepenough.artifacts import DamagedError, load_tensors, save_tensors
from deepenough.config import provenance
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.reading import (
    Positions,
    ReadingConfig,
    Tally,
    batches,
    make_reading,
    run_batch,
)
from deepenough.shortcut.statistics import LayerStatistics, Targets, statistics_bytes
from deepenough.shortcut.submodules import SubmoduleStatistics
from deepenough.training.distributed import agree, join_again

log = logging.getLogger("deepenough")

Progress = Callable[[int, int | None], None]

_MARGIN = 1.3
"""What a fit needs beside its statistics: the buffer of rows, later the maps of one source."""


@dataclass(frozen=True)
class FitOptions:
    """What is fitted, and on which positions: the options of `Shortcuts.fit` that change maps."""

    positions: Positions = "all"
    targets: Targets = "all"
    affine: bool = False
    ridge: float = 0.0
    seed: int = 0
    batch_tokens: int = 2048
    window: int | None = None


def collect(
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    options: FitOptions,
    folder: Path | None = None,
    save_every: float = 120.0,
    progress: Progress | None = None,
    parts: SubmoduleStatistics | None = None,
) -> tuple[LayerStatistics, dict[str, Any]]:
    """Return the statistics of texts, and how they were made; those of `parts` are filled in.

    Arguments are those of `Shortcuts.fit`. All processes get the statistics of all of them.
    """
    rank, world = init_distributed()
    if parts is not None:
        folder = None  # what is saved on the way are sums of layers alone
        if world > 1:
            raise UserError("Sub-modules are fitted in one process: start it without torchrun.")
    reading = make_reading(
        adapter, options.positions, options.seed, options.batch_tokens, options.window
    )
    device = adapter.model.device
    if device.type == "mps":  # Apple's GPUs have no float64.
        device = torch.device("cpu")
    _check_memory(adapter, options.targets, device)
    identity = adapter.identity()
    about = {"model": identity["fingerprint"], **asdict(options), "processes": world}
    checkpoint = FitCheckpoint(folder, about, rank, save_every) if folder else None
    statistics = LayerStatistics(adapter.num_layers, adapter.width, options.targets, device)
    tally = _accumulate(adapter, tokenizer, texts, reading, statistics, checkpoint, progress, parts)
    if world > 1:
        statistics.all_reduce()
    fit = asdict(options) | {"window": reading.window, "processes": world}
    fit["positions_taken"] = fit.pop("positions")
    data = {name: getattr(tally, name) for name in ("texts", "skipped", "windowed", "fingerprint")}
    return statistics, {"model": identity, "data": data, "fit": fit, "made_with": provenance()}


def _accumulate(
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    reading: ReadingConfig,
    statistics: LayerStatistics,
    checkpoint: FitCheckpoint | None,
    progress: Progress | None,
    parts: SubmoduleStatistics | None,
) -> Tally:
    """Add up this process's share of the texts, from where a checkpoint stands."""
    rank, world = init_distributed()
    done, texts_so_far = agree(lambda: checkpoint.load(statistics) if checkpoint else (0, ""))
    total = len(texts) if isinstance(texts, Sized) else None
    tally = Tally()
    index = 0
    for index, batch in enumerate(batches(tokenizer, texts, reading, tally), start=1):
        if index <= done:
            if index == done and tally.fingerprint != texts_so_far:
                break
            continue
        if index % world == rank:
            with parts.observing(*batch.wanted()) if parts else nullcontext():
                states = run_batch(adapter, batch)
            statistics.update(states)
        if checkpoint:
            checkpoint.save_if_due(index, tally.fingerprint, statistics)
        if progress is not None and rank == 0:
            progress(batch.texts, total)
    if done and (index < done or (index == done and tally.fingerprint != texts_so_far)):
        raise UserError(
            "The texts are not those that the fit in the folder began with: give the same, or "
            "another folder."
        )
    if checkpoint:
        checkpoint.save(index, tally.fingerprint, statistics)
    return tally


class FitCheckpoint:
    """The sums so far of one process of a fit, in a file that is complete or absent."""

    def __init__(
        self, folder: Path, about: Mapping[str, Any], rank: int, save_every: float
    ) -> None:
        self.path = folder / f"statistics-{rank:05d}.safetensors"
        self.about, self.save_every = about, save_every
        self._saved = time.monotonic()

    def load(self, statistics: LayerStatistics) -> tuple[int, str]:
        """Fill in the sums; return how many batches are done and the hash of their texts."""
        if not self.path.is_file():
            return 0, ""
        try:
            tensors, header = load_tensors(self.path)
            check_same_fit(self.path.parent, json.loads(header["about"]), self.about)
            statistics.load_state_dict(tensors)
            return int(header["batches"]), header["texts"]
        except DamagedError as error:
            log.warning("%s The fit begins again.", error)
            return 0, ""
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{self.path} is not of this fit ({error}): delete it to begin again."
            ) from error

    def save_if_due(self, batches: int, fingerprint: str, statistics: LayerStatistics) -> None:
        """Write the sums if they were last written so many seconds ago."""
        if time.monotonic() - self._saved >= self.save_every:
            self.save(batches, fingerprint, statistics)

    def save(self, batches: int, fingerprint: str, statistics: LayerStatistics) -> None:
        """Write the sums, and how far they have come in which texts."""
        about = json.dumps(self.about)
        header = {"about": about, "batches": str(batches), "texts": fingerprint}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(self.path, statistics.state_dict(), header)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error}): make room for it."
            ) from error
        self._saved = time.monotonic()


def check_same_fit(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a fit in a folder that was made with other options."""
    for name, value in now.items():
        if was.get(name) != value:
            raise UserError(
                f"{folder} holds another fit, with {name} = {was.get(name)} where this has "
                f"{value}: choose another folder."
            )


def init_distributed() -> tuple[int, int]:
    """Join the processes that `torchrun` started with this one; return its rank and their number.

    They stay together after that: what follows, another fit or a training, finds them so, and a
    group that is left cannot be joined again.
    """
    join_again()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 0, 1
        dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def _check_memory(adapter: Adapter, targets: Targets, device: torch.device) -> None:
    """Refuse a fit whose statistics do not fit into the memory that is free."""
    needed = _MARGIN * statistics_bytes(adapter.num_layers, adapter.width, targets)
    free = free_memory(device)
    if needed > free:
        raise UserError(
            f"The sums of all layers take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: "
            "fit maps to the last layer only, or on a machine with more memory."
        )


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
