"""A fit that goes on where it was killed: its statistics, and its finished passes, in a folder.

    fit.json                          what is fitted, on what, in which passes
    statistics-RANK.safetensors       sums so far of the pass under way, of each process
    pass-NUMBER.safetensors           the maps of a finished pass

Every file is complete or absent. How far a process has come stands in the header of its statistics,
so that the two can never disagree. Texts are not kept: those that were read already are read again,
without running the model, and must be the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from deepenough.artifacts import load_tensors, save_tensors, write_json
from deepenough.errors import UserError
from deepenough.shortcut.pairs import Plan
from deepenough.shortcut.processes import Processes
from deepenough.shortcut.saved import map_tensors, split_tensors
from deepenough.shortcut.solve import Maps
from deepenough.shortcut.statistics import Statistics


class Solved(NamedTuple):
    """What a pass gives."""

    maps: Maps
    biases: Maps
    aligned: Tensor
    values: dict[str, Any]
    """Counts and the like."""


class FitFolder:
    """The folder of one fit, as one of its processes sees it."""

    def __init__(self, path: Path, about: dict[str, Any], processes: Processes) -> None:
        self.path, self.processes = path, processes
        self.about = json.loads(json.dumps(about | {"processes": processes.world}))
        self._index = path / "fit.json"
        self._statistics = path / f"statistics-{processes.rank:05d}.safetensors"

    def passes(self, planned: list[Plan]) -> list[Plan]:
        """The passes of the fit that is there already, or else those planned now.

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

    def keep_statistics(
        self, number: int, batches: int, fingerprint: str, statistics: Statistics
    ) -> None:
        """Remember a pass under way, which has come so far in texts with this fingerprint."""
        header = {"pass": str(number), "batches": str(batches), "texts": fingerprint}
        _save(self._statistics, statistics.state_dict(), header)

    def load_statistics(self, number: int, statistics: Statistics) -> tuple[int, str]:
        """Go on with a pass: how many batches are done, and the fingerprint of their texts."""
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

    def keep_pass(self, number: int, solved: Solved) -> Solved:
        """Write a finished pass; its maps come back mapped from the file."""
        if self.processes.rank == 0:
            tensors = map_tensors(solved.maps, solved.biases) | {"aligned": solved.aligned}
            header = {"values": json.dumps(solved.values)}
            _save(self._pass(number), tensors, header)
        self.processes.wait()
        self._statistics.unlink(missing_ok=True)
        return self.load_pass(number) or solved

    def load_pass(self, number: int) -> Solved | None:
        """A finished pass, if it is there."""
        if not self._pass(number).is_file():
            return None
        tensors, header = load_tensors(self._pass(number))
        maps, biases, others = split_tensors(tensors)
        return Solved(maps, biases, others["aligned"], json.loads(header["values"]))

    def _pass(self, number: int) -> Path:
        return self.path / f"pass-{number:05d}.safetensors"


def _save(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    try:
        save_tensors(path, tensors, header)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({error}): make room for it.") from error
