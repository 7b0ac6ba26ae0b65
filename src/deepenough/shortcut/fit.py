"""Fit maps for a model: passes over the text, statistics, maps.

One pass does it unless memory is short. Whatever the number of passes, of processes, or of kills
and resumptions in between, the maps are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepenough.config import provenance
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.collect import make_reading, run_batch
from deepenough.shortcut.keeping import FitFolder, Solved
from deepenough.shortcut.memory import default_limit, plan_passes
from deepenough.shortcut.pairs import Plan, Targets, make_plan
from deepenough.shortcut.processes import Processes, meet
from deepenough.shortcut.similarity import alignments
from deepenough.shortcut.solve import Maps, solve
from deepenough.shortcut.statistics import Statistics
from deepenough.shortcut.windows import Positions, Reading, Tally, batches

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class FitSettings:
    """What is fitted, and on which positions."""

    positions: Positions = "all"
    targets: Targets = "all"
    affine: bool = False
    ridge: float = 0.0
    seed: int = 0
    batch_tokens: int = 2048
    window: int | None = None


@dataclass
class Fitted:
    """All passes together."""

    maps: Maps
    biases: Maps
    aligned: Tensor
    meta: dict[str, Any]


def fit_model(
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    settings: FitSettings,
    memory_limit: float | None = None,
    folder: Path | None = None,
    save_every: float = 120.0,
    progress: Progress | None = None,
) -> Fitted:
    """Fit all maps that `settings` ask for; the options are those of `Shortcuts.fit`."""
    fit = _Fit(adapter, tokenizer, texts, settings, meet())
    return fit.run(memory_limit, folder, save_every, progress)


class _Fit:
    """What stays the same over the passes of one fit."""

    def __init__(
        self,
        adapter: Adapter,
        tokenizer: Any,
        texts: Iterable[str],
        settings: FitSettings,
        processes: Processes,
    ) -> None:
        self.adapter, self.tokenizer, self.settings = adapter, tokenizer, settings
        # An iterator can be read once only, but there may be several passes.
        self.texts = list(texts) if isinstance(texts, Iterator) else texts
        self.processes = processes
        self.reading: Reading = make_reading(
            adapter, settings.positions, settings.seed, settings.batch_tokens, settings.window
        )
        self.plan = make_plan(adapter.num_layers, settings.targets)
        device = adapter.model.device
        # Apple's GPUs have no float64.
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.dtype = torch.float64 if adapter.model.dtype == torch.float64 else torch.float32

    def run(
        self,
        memory_limit: float | None,
        folder: Path | None,
        save_every: float,
        progress: Progress | None,
    ) -> Fitted:
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
            about = {"model": identity["fingerprint"], **asdict(self.settings)}
            kept = FitFolder(folder, about, self.processes)
            passes = kept.passes(passes)
        solved = []
        for number, plan in enumerate(passes):
            before = number / len(passes)
            show = self._shown(progress, before, len(passes))
            solved.append(self._pass(number, plan, kept, save_every, show))
        return _join(solved, identity, self._meta(len(passes), time.perf_counter() - began))

    def _pass(
        self,
        number: int,
        plan: Plan,
        kept: FitFolder | None,
        save_every: float,
        show: Callable[[int], None],
    ) -> Solved:
        if kept is not None and (finished := kept.load_pass(number)):
            return finished
        statistics = Statistics(self.adapter.num_layers, self.adapter.width, plan, self.device)
        tally = self._accumulate(number, statistics, kept, save_every, show)
        if self.processes.world > 1:
            statistics.all_reduce()
        statistics.finish()
        aligned = alignments(statistics)
        count = statistics.count
        maps, biases, dependent = solve(
            statistics, self.settings.affine, self.settings.ridge, self.dtype
        )
        values = {
            "positions": count,
            "dependent": dependent,
            "texts": tally.texts,
            "skipped": tally.skipped,
            "windowed": tally.windowed,
            "fingerprint": tally.fingerprint,
        }
        solved = Solved(maps, biases, aligned, values)
        return solved if kept is None else kept.keep_pass(number, solved)

    def _accumulate(
        self,
        number: int,
        statistics: Statistics,
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
                statistics.update(run_batch(self.adapter, batch).states)
            if kept is not None and time.monotonic() - saved >= save_every:
                kept.keep_statistics(number, index, tally.fingerprint, statistics)
                saved = time.monotonic()
            show(batch.texts)
        if done and (index < done or (index == done and tally.fingerprint != texts_so_far)):
            raise UserError(
                "The texts are not those that the fit in the folder began with: give the same, or "
                "another folder."
            )
        return tally

    def _shown(
        self, progress: Progress | None, before: float, num_passes: int
    ) -> Callable[[int], None]:
        """Texts read in all passes, for the first process to show."""
        if progress is None or self.processes.rank > 0:
            return lambda texts: None
        total = len(self.texts) * num_passes if isinstance(self.texts, Sized) else None
        start = 0 if total is None else round(before * total)
        return lambda texts: progress(start + texts, total)

    def _meta(self, num_passes: int, seconds: float) -> dict[str, Any]:
        settings = asdict(self.settings)
        return {
            "positions_taken": settings.pop("positions"),
            **settings,
            "window": self.reading.window,
            "passes": num_passes,
            "processes": self.processes.world,
            "seconds": round(seconds, 3),
        }


def _join(solved: list[Solved], identity: dict[str, Any], fit: dict[str, Any]) -> Fitted:
    maps: Maps = {}
    biases: Maps = {}
    aligned = solved[0].aligned.clone()
    dependent: set[int] = set()
    for part in solved:
        maps |= part.maps
        biases |= part.biases
        aligned = torch.where(aligned.isnan(), part.aligned, aligned)
        dependent |= set(part.values["dependent"])
    values = solved[0].values
    if any(part.values["fingerprint"] != values["fingerprint"] for part in solved):
        raise UserError(
            "The texts changed from one pass to the next: give texts that can be read repeatedly."
        )
    data = {name: values[name] for name in ("texts", "skipped", "windowed", "fingerprint")}
    fit |= {"positions": values["positions"], "dependent": sorted(dependent)}
    return Fitted(
        maps,
        biases,
        aligned,
        {"model": identity, "data": data, "fit": fit, "made_with": provenance()},
    )
