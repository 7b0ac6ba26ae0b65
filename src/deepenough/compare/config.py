"""What to compare, on what, at which operating points, and how to measure it."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from deepenough.compare.protocol import Rules
from deepenough.config import options, resolve
from deepenough.errors import UserError
from deepenough.par.evaluation import model_folder
from deepenough.runs import RunFolder


@dataclass
class Grid:
    """Operating points; each list is for the runs it fits, and one left out is chosen for them"""

    mem_len: list[int] | None = None
    """Language models: tokens of memory before a segment."""

    threshold: list[float] | None = None
    """Classifiers that ponder: probability of having halted at which they stop."""

    confidence: list[float] | None = None
    """Classifiers that ponder: probability of the answer at which they stop."""

    passes: list[int] | None = None
    """Classifiers that ponder: passes that all examples make."""

    epsilon: list[float] | None = None
    """Lazy transformers: gate below which a token stops being updated; by default 0.05, 0.075 and
    0.1 or, where gates compare a state with its update, 0.15, 0.2 and 0.25."""

    steps: list[int] | None = None
    """Lazy transformers: steps over the source."""

    exit: list[float] | None = None
    """Shortcuts: confidence at which a generated token leaves early."""


@dataclass
class Entry:
    """One run of a comparison."""

    run: str
    """Folder of a finished run."""

    name: str | None = None
    """What the chart calls it; by default the end of its path."""

    mechanisms: list[str] | None = None
    """Which of its ways to run are measured, such as full, speculative and exit; by default all."""

    tuned: str | None = None
    """Writing: folder of deepenough exit tune for the same model; its drafts take part."""

    grid: Grid = field(default_factory=Grid)


@dataclass
class ComparedData:
    """Data that all runs answer"""

    data: str | None = None
    """A text, or a data set, named as for training; by default what the runs were trained on."""

    split: str | None = None
    """Part of it; by default test, else valid, but valid first for classifiers and for prompts."""

    limit: int | None = None
    """At most so many segments, examples, sentences or prompts; by default as many as a minute or
    so needs."""

    batch_size: int | None = None
    """Lanes or examples at once; by default those of training, and 32 examples."""

    prompt_tokens: int = 32
    """Generation: tokens of a prompt."""

    new_tokens: int = 32
    """Generation: tokens that follow it."""


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


def read_config(run: str) -> dict[str, Any]:
    """The settings that a run was made with, as they stand in its file."""
    folder = RunFolder.open(run)
    try:
        content = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{folder.config} cannot be read, so nothing tells what {run} was trained on: leave "
            "the run out, or make it again."
        ) from error
    return content if isinstance(content, dict) else {}


def read_section(run: str, name: str) -> dict[str, Any]:
    """One section of them."""
    found = read_config(str(model_folder(run).parent)).get(name)
    if not isinstance(found, dict):
        raise UserError(f"The settings of {run} have no section {name}: leave the run out.")
    return found


def content_of(parts: Iterable[object]) -> str:
    """What tells one set of data from another: runs may have held out other parts of one file."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()
