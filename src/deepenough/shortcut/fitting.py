"""Collect the statistics of a model: one pass over the text, from which all maps follow.

Whatever the number of processes, or of kills and resumptions in between, they are the same. A fit
that is given a folder goes on where it was killed: each process keeps there its sums so far,
`statistics-RANK.safetensors`, whose header says what is fitted and how far it has come in which
texts. Texts are not kept: those that were read already are read again, without running the model,
and must be the same.

Sums that memory has no room for are kept in files, in the same folder or that of temporary files:
of a model of 70 billion weights they take 87 GB for maps to the last layer. The system then
holds in memory what fits, rows are gathered in a larger buffer so that the files are gone through
less often, and maps are solved for one target at a time. The files go with the process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepenough.artifacts import DamagedError, load_tensors, save_tensors
from deepenough.config import provenance
from deepenough.devices import device_of, free_memory, sums_device
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
from deepenough.shortcut.statistics import (
    LayerStatistics,
    Targets,
    layer_pairs,
    statistics_bytes,
)
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
    memory: float | None = None,
) -> tuple[LayerStatistics, dict[str, Any]]:
    """Return the statistics of texts, and how they were made; those of `parts` are filled in.

    Arguments are those of `Shortcuts.fit`, `memory` in bytes. All processes get the
    statistics of all of them.
    """
    rank, world = init_distributed()
    if parts is not None:
        folder = None  # what is saved on the way are sums of layers alone
        if world > 1:
            raise UserError("Sub-modules are fitted in one process: start it without torchrun.")
    reading = make_reading(
        adapter, options.positions, options.seed, options.batch_tokens, options.window
    )
    shape = adapter.num_layers, adapter.width, options.targets
    where = _common_place(place_sums(*shape, device_of(adapter.model), memory))
    files = folder or Path(tempfile.gettempdir())
    statistics = agree(lambda: _make_statistics(adapter, options.targets, where, files))
    if statistics.in_files:
        folder = None  # to write them a second time would take as long as to make them
    identity = adapter.identity()
    about = {"model": identity["fingerprint"], **asdict(options), "processes": world}
    checkpoint = FitCheckpoint(folder, about, rank, save_every) if folder else None
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


class SumsPlace(NamedTuple):
    """Where the sums of a fit are kept."""

    device: torch.device
    on_disk: bool = False
    room: float = math.inf
    """Bytes of memory that there is for them."""


def place_sums(
    num_layers: int,
    width: int,
    targets: Targets,
    device: torch.device,
    memory: float | None = None,
) -> SumsPlace:
    """Return where the sums of all layers go: to the model's device, to memory, or into files.

    They go where there is room for them; `memory` are the bytes that they may take, by default what
    is free, of which processes on one machine have a share each.
    """
    needed = _MARGIN * statistics_bytes(num_layers, width, targets)
    cpu = torch.device("cpu")
    room = 0.0
    for place in dict.fromkeys((sums_device(device), cpu)):
        room = free_memory(place)
        if place.type == "cpu":
            room /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = room if memory is None else memory
        if needed <= room:
            return SumsPlace(place, room=room)
    return SumsPlace(cpu, True, room)


def _common_place(own: SumsPlace) -> SumsPlace:
    """Return the place for all processes, which exchange their sums: that of the narrowest."""
    if not dist.is_initialized():
        return own
    places = [own] * dist.get_world_size()
    dist.all_gather_object(places, own)
    if len({(each.device.type, each.on_disk) for each in places}) == 1:
        return own
    room = min(each.room for each in places)
    return SumsPlace(torch.device("cpu"), any(each.on_disk for each in places), room)


def maps_bytes(num_layers: int, width: int, targets: Targets, dtype: torch.dtype) -> int:
    """Return the size of the maps, in float32 at least."""
    size = torch.promote_types(dtype, torch.float32).itemsize
    return len(layer_pairs(num_layers, targets)) * width * width * size


def _make_statistics(
    adapter: Adapter, targets: Targets, where: SumsPlace, files: Path
) -> LayerStatistics:
    """Return sums from nothing, in memory or in files of a folder; the folder exists then."""
    shape = adapter.num_layers, adapter.width, targets
    if not where.on_disk:
        return LayerStatistics(*shape, where.device)
    size, free = statistics_bytes(*shape), free_memory(torch.device("cpu"))
    # The maps stay in memory until they are written, which takes a copy of them.
    maps = 2 * maps_bytes(*shape, adapter.model.dtype) + 6 * adapter.width**2 * 8
    if maps > free:
        raise UserError(
            f"The maps take {maps / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: fit "
            "maps to the last layer only (--targets last), or on a machine with more memory."
        )
    log.warning(
        "The sums of all layers take %.1f GB, and memory has room for %.1f GB: they are kept in "
        "files in %s, which takes longer, and an interrupted fit begins again.",
        size / 1e9,
        where.room / 1e9,
        files,
    )
    try:
        files.mkdir(parents=True, exist_ok=True)
        return LayerStatistics(*shape, where.device, files, where.room / 2)
    except OSError as error:
        free = shutil.disk_usage(files).free if files.is_dir() else 0
        raise UserError(
            f"The sums of all layers take {size / 1e9:.1f} GB in {files}, where {free / 1e9:.1f} "
            f"GB are free ({error.strerror}): give a folder on a larger disk, or fit maps to the "
            "last layer only (--targets last)."
        ) from error
