"""What to compare, on what, at which operating points, and how to measure it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from deepenough.compare.protocol import Rules
from deepenough.config import options, resolve
from deepenough.errors import UserError
from deepenough.measurement import ComparedData, Entry, Grid


@dataclass
class CompareSettings:
    """Compare runs."""

    runs: list[str] = field(default_factory=list)
    """Folders of finished runs."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """The same with more to say, in a file: each has a run and may have name, mechanisms, tuned,
    grid."""

    tuned: str | None = None
    """Writing: folder of deepenough exit tune for the same model; its drafts take part."""

    out: str = "runs/compare"
    """Folder for frontier.json and its pictures."""

    data: ComparedData = field(default_factory=ComparedData)
    grid: Grid = field(default_factory=Grid)

    rounds: int = 7
    """How often every point is timed; fewer than 6 give intervals of less than 95 %."""

    warmup: int = 1
    """How often it runs before that."""

    threads: int | None = None
    """Threads of torch; by default as many as it takes by itself."""

    seed: int = 0
    """Seed of the order in which points take turns."""

    count_flops: bool = True
    """Count FLOPs with torch's counter too, beside those of the traces: one more pass a point."""

    def check(self) -> None:
        at_least = {"rounds": 1, "warmup": 1, "threads": 1}
        given = {name: getattr(self, name) for name in at_least}
        at_least |= {"data.limit": 1, "data.batch_size": 1}
        given |= {"data.limit": self.data.limit, "data.batch_size": self.data.batch_size}
        at_least |= {"data.prompt_tokens": 1, "data.new_tokens": 1}
        given |= {
            f"data.{name}": getattr(self.data, name) for name in ("prompt_tokens", "new_tokens")
        }
        for name, value in given.items():
            if value is not None and value < at_least[name]:
                raise UserError(f"{name} must be at least {at_least[name]}: got {value}.")

    def command(self) -> str:
        """The command line that measures the same, however the settings were given."""
        words = ["deepenough", "compare", *self.runs]
        for option in options(CompareSettings):
            value: Any = self
            for name in option.name.split("."):
                value = getattr(value, name)
            if option.name != "runs" and value != option.default:
                spelt = json.dumps(value) if isinstance(value, list | bool) else str(value)
                words.append(f"--{option.name}={spelt}")
        return shlex.join(words)

    def rules(self) -> Rules:
        return Rules(
            rounds=self.rounds, warmup=self.warmup, seed=self.seed, count_flops=self.count_flops
        )

    def all_entries(self) -> list[Entry]:
        """Every run to compare; what an entry leaves open the comparison's own grid says."""
        named = [Entry(run) for run in self.runs]
        named += [resolve(Entry, overrides=each) for each in self.entries]
        if not named:
            raise UserError(
                "There is nothing to compare: name the folders of finished runs, as in "
                "deepenough compare runs/first runs/second."
            )
        for entry in named:
            entry.tuned = entry.tuned or self.tuned
            for name, values in vars(self.grid).items():
                if getattr(entry.grid, name) is None:
                    setattr(entry.grid, name, values)
        return named
