"""Fit maps for a model: passes over the text, statistics, maps.

One pass does it unless memory is short. Whatever the number of passes, of processes, or of kills
and resumptions in between, the maps are the same.

A fit that is given a folder goes on where it was killed. The folder holds

    fit.json                          what is fitted, on what, in which passes
    statistics-RANK.safetensors       sums so far of the pass under way, of each process
    pass-NUMBER.safetensors           the maps of a finished pass

Every file is complete or absent. How far a process has come stands in the header of its statistics,
so that the two can never disagree. Texts are not kept: those that were read already are read again,
without running the model, and must be the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from deepenough.artifacts import load_tensors, save_tensors, write_json
from deepenough.config import provenance
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.reading import Positions, Tally, batches, make_reading, run_batch
from deepenough.shortcut.statistics import LayerStatistics, Maps, Plan

Targets = Literal["all", "last"]
Progress = Callable[[int, int | None], None]

_MARGIN = 1.3
"""What a pass needs beside its statistics: the buffer of rows, later the maps of one source."""
_SHARE_OF_FREE = 0.7


# -- which pairs of layers, and in how many passes -------------------------------------------------


def make_plan(num_layers: int, targets: Targets = "all") -> Plan:
    """Return the targets of every source of a model of `num_layers` layers (one state more).

    The last layer stands in the plan without targets: its Gram matrix is needed to compare it with
    the others.
    """
    if num_layers < 1:
        raise UserError("Shortcuts need the states of at least two layers, h_0 and h_1.")
    if targets not in ("all", "last"):
        raise UserError(f"The targets {targets!r} are not known: choose 'all' or 'last'.")
    last = num_layers
    if targets == "last":
        return {**dict.fromkeys(range(last), (last,)), last: ()}
    return {i: tuple(range(i + 1, last + 1)) for i in range(last + 1)}


def pairs_of(plan: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs `(source, target)` of a plan, source by source."""
    for source, targets in plan.items():
        for target in targets:
            yield source, target


def num_blocks(plan: Mapping[int, tuple[int, ...]]) -> int:
    """Return how many `d x d` blocks of float64 the statistics of a plan hold."""
    return sum(1 + len(targets) for targets in plan.values())


def plan_bytes(plan: Mapping[int, tuple[int, ...]], width: int) -> int:
    """Return the size of the statistics of a plan for layers of this width."""
    return num_blocks(plan) * width * width * torch.float64.itemsize


def split_plan(plan: Plan, width: int, limit: float) -> list[Plan]:
    """Cut a plan into passes that stay within `limit` bytes each.

    A source whose targets fall in several passes is accumulated again in each, which gives the
    same maps: a map depends on its own pair and the source's Gram matrix only.
    """
    block = width * width * torch.float64.itemsize * _MARGIN
    room = int(limit // block)
    if room < 2:
        raise UserError(
            f"A memory limit of {limit / 1e6:,.0f} MB is too small for maps of width {width}: "
            f"give at least {2 * block / 1e6:,.0f} MB."
        )
    passes: list[Plan] = [{}]
    free = room
    for source, targets in plan.items():
        rest = list(targets)
        while True:
            if free < 1 + min(1, len(rest)):
                passes.append({})
                free = room
            taken = tuple(rest[: free - 1])
            passes[-1][source] = taken
            free -= 1 + len(taken)
            rest = rest[len(taken) :]
            if not rest:
                break
    return passes


def plan_passes(plan: Plan, width: int, limit: float, map_bytes: int, on_disk: bool) -> list[Plan]:
    """Return as few passes over the text as a memory limit allows.

    In one pass, maps take the place of the statistics they come from. In several, the maps of
    earlier passes take memory too, unless they are kept on disk.

    Args:
        plan: All pairs.
        width: Width of the layers.
        limit: Memory in bytes; may be infinite.
        map_bytes: Size of one map.
        on_disk: Whether the maps of finished passes are kept on disk.
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


def default_limit(device: torch.device) -> float:
    """Return most of the memory that is free on a device, in bytes; infinity if unknown."""
    if device.type == "cuda":
        return _SHARE_OF_FREE * float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return _SHARE_OF_FREE * float(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return float("inf")


# -- several processes -----------------------------------------------------------------------------


class Processes(NamedTuple):
    """This process and how many there are."""

    rank: int = 0
    world: int = 1

    def least(self, value: float) -> float:
        """Return the least of what the processes have, so that all go on with the same."""
        if self.world == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        answer = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return float(answer)

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.least(0.0)


def init_distributed() -> Processes:
    """Join the processes that `torchrun` or `accelerate launch` started with this one.

    They stay together after that: what follows, another fit or a training, finds them so, and a
    group that is left cannot be joined again.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes()
        dist.init_process_group()
    return Processes(dist.get_rank(), dist.get_world_size())


# -- the folder of a fit under way -----------------------------------------------------------------


class PassResult(NamedTuple):
    """The maps of one pass."""

    maps: Maps
    biases: Maps
    aligned: Tensor
    """What CKA is computed from."""
    values: dict[str, Any]
    """Counts of texts and positions, and the fingerprint of the texts."""


class FitFolder:
    """The folder of one fit, as one of its processes sees it."""

    def __init__(self, path: Path, about: dict[str, Any], processes: Processes) -> None:
        self.path, self.processes = path, processes
        self.about = json.loads(json.dumps(about | {"processes": processes.world}))
        self._index = path / "fit.json"
        self._statistics = path / f"statistics-{processes.rank:05d}.safetensors"

    def passes(self, planned: list[Plan]) -> list[Plan]:
        """Return the passes of the fit that is there already, or else those planned now.

        The memory that is free changes from one start to the next; the passes must not.
        """
        if self.processes.rank == 0 and not self._index.is_file():
            self._begin(planned)
        self.processes.wait()
        try:
            content = json.loads(self._index.read_text(encoding="utf-8"))
            about = content["about"]
            passes = [{int(i): tuple(to) for i, to in part} for part in content["passes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._index} cannot be read ({error}): delete {self.path} and fit anew."
            ) from error
        for name in sorted(self.about.keys() | about.keys()):
            was, now = about.get(name), self.about.get(name)
            if was != now:
                raise UserError(
                    f"{self.path} holds another fit, with {name} = {was} where this has {now}: "
                    "choose another folder."
                )
        return passes

    def _begin(self, passes: list[Plan]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise UserError(
                    f"{self.path} holds files but no fit: choose an empty or a new folder."
                )
            plans = [list(part.items()) for part in passes]
            write_json(self._index, {"about": self.about, "passes": plans})
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}.") from error

    def save_statistics(
        self, number: int, batches: int, fingerprint: str, statistics: LayerStatistics
    ) -> None:
        """Write the sums of a pass under way, and how far it has come in which texts."""
        header = {"pass": str(number), "batches": str(batches), "texts": fingerprint}
        _save(self._statistics, statistics.state_dict(), header)

    def load_statistics(self, number: int, statistics: LayerStatistics) -> tuple[int, str]:
        """Fill in the sums of a pass; return how many batches are done and the texts' hash."""
        if not self._statistics.is_file():
            return 0, ""
        tensors, header = load_tensors(self._statistics)
        if header.get("pass") != str(number):
            return 0, ""
        try:
            statistics.load_state_dict(tensors)
            return int(header["batches"]), header["texts"]
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{self._statistics} is not of this fit ({error}): delete it to begin the pass "
                "again."
            ) from error

    def save_pass(self, number: int, result: PassResult) -> PassResult:
        """Write a finished pass, and return it with its maps mapped from the file."""
        if self.processes.rank == 0:
            tensors = map_tensors(result.maps, result.biases) | {"aligned": result.aligned}
            _save(self._pass(number), tensors, {"values": json.dumps(result.values)})
        self.processes.wait()
        self._statistics.unlink(missing_ok=True)
        return self.load_pass(number) or result

    def load_pass(self, number: int) -> PassResult | None:
        """Return a finished pass, if it is there."""
        if not self._pass(number).is_file():
            return None
        tensors, header = load_tensors(self._pass(number))
        maps, biases, others = split_tensors(tensors)
        return PassResult(maps, biases, others["aligned"], json.loads(header["values"]))

    def _pass(self, number: int) -> Path:
        return self.path / f"pass-{number:05d}.safetensors"


def map_tensors(maps: Maps, biases: Maps) -> dict[str, Tensor]:
    """Return maps and biases by the names they have in files: `A.i.j` and `b.i.j`."""
    tensors = {f"A.{i}.{j}": matrix for (i, j), matrix in sorted(maps.items())}
    return tensors | {f"b.{i}.{j}": bias for (i, j), bias in sorted(biases.items())}


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[Maps, Maps, dict[str, Tensor]]:
    """Return maps, biases, and what is neither, from named tensors."""
    maps: Maps = {}
    biases: Maps = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match name.split("."):
            case ["A", i, j]:
                maps[int(i), int(j)] = tensor
            case ["b", i, j]:
                biases[int(i), int(j)] = tensor
            case _:
                others[name] = tensor
    return maps, biases, others


def _save(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    try:
        save_tensors(path, tensors, header)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({error}): make room for it.") from error


# -- the fit ---------------------------------------------------------------------------------------


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


@dataclass
class FitResult:
    """All passes together."""

    maps: Maps
    biases: Maps
    aligned: Tensor
    meta: dict[str, Any]


class Fit:
    """One fit of a model's maps: what stays the same over its passes."""

    def __init__(
        self, adapter: Adapter, tokenizer: Any, texts: Iterable[str], options: FitOptions
    ) -> None:
        self.adapter, self.tokenizer, self.options = adapter, tokenizer, options
        # An iterator can be read once only, but there may be several passes.
        self.texts = list(texts) if isinstance(texts, Iterator) else texts
        self.processes = init_distributed()
        self.reading = make_reading(
            adapter, options.positions, options.seed, options.batch_tokens, options.window
        )
        self.plan = make_plan(adapter.num_layers, options.targets)
        device = adapter.model.device
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.dtype = torch.float64 if adapter.model.dtype == torch.float64 else torch.float32

    def run(
        self,
        memory_limit: float | None = None,
        folder: Path | None = None,
        save_every: float = 120.0,
        progress: Progress | None = None,
    ) -> FitResult:
        """Fit all maps; the arguments are those of `Shortcuts.fit`."""
        began = time.perf_counter()
        identity = self.adapter.identity()
        limit = default_limit(self.device) if memory_limit is None else memory_limit
        width = self.adapter.width
        passes = plan_passes(
            self.plan,
            width,
            self.processes.least(limit),
            width * width * self.dtype.itemsize,
            on_disk=folder is not None,
        )
        kept = None
        if folder is not None:
            about = {"model": identity["fingerprint"], **asdict(self.options)}
            kept = FitFolder(folder, about, self.processes)
            passes = kept.passes(passes)
        results = []
        for number, plan in enumerate(passes):
            show = self._shown(progress, number, len(passes))
            results.append(self._pass(number, plan, kept, save_every, show))
        return _join(results, identity, self._meta(len(passes), time.perf_counter() - began))

    def _pass(
        self,
        number: int,
        plan: Plan,
        kept: FitFolder | None,
        save_every: float,
        show: Callable[[int], None],
    ) -> PassResult:
        if kept is not None and (finished := kept.load_pass(number)):
            return finished
        statistics = LayerStatistics(self.adapter.num_layers, self.adapter.width, plan, self.device)
        tally = self._accumulate(number, statistics, kept, save_every, show)
        if self.processes.world > 1:
            statistics.all_reduce()
        statistics.finish()
        aligned = statistics.alignments()
        count = statistics.count
        maps, biases, dependent = statistics.solve(
            self.options.affine, self.options.ridge, self.dtype
        )
        values = {
            "positions": count,
            "dependent": dependent,
            "texts": tally.texts,
            "skipped": tally.skipped,
            "windowed": tally.windowed,
            "fingerprint": tally.fingerprint,
        }
        result = PassResult(maps, biases, aligned, values)
        return result if kept is None else kept.save_pass(number, result)

    def _accumulate(
        self,
        number: int,
        statistics: LayerStatistics,
        kept: FitFolder | None,
        save_every: float,
        show: Callable[[int], None],
    ) -> Tally:
        done, texts_so_far = (0, "") if kept is None else kept.load_statistics(number, statistics)
        tally = Tally()
        index = 0
        saved = time.monotonic()
        for index, batch in enumerate(
            batches(self.tokenizer, self.texts, self.reading, tally), start=1
        ):
            if index <= done:
                if index == done and tally.fingerprint != texts_so_far:
                    break
                continue
            if index % self.processes.world == self.processes.rank:
                statistics.update(run_batch(self.adapter, batch))
            if kept is not None and time.monotonic() - saved >= save_every:
                kept.save_statistics(number, index, tally.fingerprint, statistics)
                saved = time.monotonic()
            show(batch.texts)
        if done and (index < done or (index == done and tally.fingerprint != texts_so_far)):
            raise UserError(
                "The texts are not those that the fit in the folder began with: give the same, or "
                "another folder."
            )
        return tally

    def _shown(
        self, progress: Progress | None, number: int, num_passes: int
    ) -> Callable[[int], None]:
        """Return what shows the texts read in all passes; only the first process shows them."""
        if progress is None or self.processes.rank > 0:
            return lambda texts: None
        total = len(self.texts) if isinstance(self.texts, Sized) else None
        if total is None:
            return lambda texts: progress(texts, None)
        return lambda texts: progress(number * total + texts, total * num_passes)

    def _meta(self, num_passes: int, seconds: float) -> dict[str, Any]:
        options = asdict(self.options)
        return {
            "positions_taken": options.pop("positions"),
            **options,
            "window": self.reading.window,
            "passes": num_passes,
            "processes": self.processes.world,
            "seconds": round(seconds, 3),
        }


def _join(results: list[PassResult], identity: dict[str, Any], fit: dict[str, Any]) -> FitResult:
    maps: Maps = {}
    biases: Maps = {}
    aligned = results[0].aligned.clone()
    dependent: set[int] = set()
    for part in results:
        maps |= part.maps
        biases |= part.biases
        aligned = torch.where(aligned.isnan(), part.aligned, aligned)
        dependent |= set(part.values["dependent"])
    values = results[0].values
    if any(part.values["fingerprint"] != values["fingerprint"] for part in results):
        raise UserError(
            "The texts changed from one pass to the next: give texts that can be read repeatedly."
        )
    data = {name: values[name] for name in ("texts", "skipped", "windowed", "fingerprint")}
    fit |= {"positions": values["positions"], "dependent": sorted(dependent)}
    meta = {"model": identity, "data": data, "fit": fit, "made_with": provenance()}
    return FitResult(maps, biases, aligned, meta)
