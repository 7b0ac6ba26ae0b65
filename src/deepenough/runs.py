"""What a run leaves behind: a folder of files with fixed names, and one line per measurement.

`metrics.jsonl` is the interface between a run and everything that looks at it later: training
appends `Record`s, reports read them, and neither knows the other. Two choices follow from that:

- A run may be killed at any moment. Every record is written as one line in one call, a line torn by
  a kill is mended before the next append, and a reader skips (and counts) what it cannot read.
- Values come back as they went in, so NaN and infinity are written as Python's `json` writes them
  (`NaN`, `Infinity`): a loss that diverged must not look like a missing one.
"""

from __future__ import annotations

import json
import os
import shutil
import time as clock
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deepenough.artifacts import atomic_path
from deepenough.errors import UserError

_OWN_KEYS = ("step", "kind", "time")

#: What a fit of maps writes into its run folder, beside what a training writes.
FITTED = {"shortcuts", "affine", "tuning"}


@dataclass(frozen=True)
class Record:
    """One measurement: at which step, of what kind, which values, and when (seconds since 1970)."""

    step: int
    kind: str
    values: dict[str, Any]
    time: float = field(default_factory=clock.time)

    def __post_init__(self) -> None:
        if taken := [key for key in _OWN_KEYS if key in self.values]:
            raise ValueError(f"a record's values cannot be named {taken[0]!r}, a key of its own")

    def to_json(self) -> str:
        """Return the record as one line without its line end."""
        own = {"step": self.step, "kind": self.kind, "time": self.time}
        return json.dumps(own | self.values, default=_plain)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Read one line; ValueError if it is not a record."""
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("a record is a JSON object")
        try:
            step, kind, time = (content.pop(key) for key in _OWN_KEYS)
        except KeyError as error:
            raise ValueError(f"a record needs the key {error}") from None
        if type(step) is not int or not isinstance(kind, str) or not isinstance(time, int | float):
            raise ValueError("a record's step, kind and time are an int, a string and a number")
        return cls(step, kind, content, float(time))


def _plain(value: Any) -> Any:
    """Return a tensor or array as a list or number, without importing its library."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


class Metrics:
    """The file `metrics.jsonl` of a run that is being written.

    The file is opened anew for every record: at a few records a second this costs nothing, and
    there is no open handle to leak, to share between processes or to leave behind after a crash.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _mend_last_line(self.path)

    def append(self, record: Record) -> None:
        """Add one line; it is with the operating system when this returns."""
        line = record.to_json() + "\n"
        try:
            with open(self.path, "ab") as file:
                file.write(line.encode())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}; make room or choose a folder "
                "that can be written to."
            ) from error

    def truncate_after(self, step: int) -> int:
        """Drop the records later than `step`, so that a resumed run does not say things twice.

        Lines that cannot be read stay as they are. Returns how many records were dropped.
        """
        if not self.path.exists():
            return 0
        dropped = 0
        with atomic_path(self.path) as partial, open(partial, "wb") as kept:
            for line, record in _lines(self.path):
                if record is not None and record.step > step:
                    dropped += 1
                else:
                    kept.write(line)
        return dropped


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append a single record to a metrics file, for code that writes only now and then."""
    Metrics(path).append(record)


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Return all records of a metrics file in order, and how many corrupted lines were skipped."""
    if not Path(path).is_file():
        raise UserError(
            f"There is no metrics file {path}; give the folder of a run that has started."
        )
    records: list[Record] = []
    num_corrupted = 0
    for _, record in _lines(Path(path)):
        if record is None:
            num_corrupted += 1
        else:
            records.append(record)
    return records, num_corrupted


def _lines(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Yield every line that is not blank, with its record, or None for one that is corrupted."""
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield line, _record_or_none(line)


def _record_or_none(line: bytes) -> Record | None:
    try:
        return Record.from_json(line)
    except ValueError:  # bad JSON, bad UTF-8 and bad fields alike
        return None


def _mend_last_line(path: Path) -> None:
    """Complete or remove a last line without its end, else the next record would be glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        content_end = file.seek(0, os.SEEK_END)
        tail = b""
        start = content_end
        while start > 0 and b"\n" not in tail:
            block = min(start, 65536)
            start -= block
            file.seek(start)
            tail = file.read(block) + tail
        torn = tail.rpartition(b"\n")[2]
        if not torn:
            return
        if _record_or_none(torn) is not None:
            file.seek(content_end)
            file.write(b"\n")
        else:
            file.truncate(content_end - len(torn))


class RunFolder:
    """The folder of one run and the places in it.

    `RunFolder(path)` names the places without touching the disk, `create` starts or resumes a run
    there, `open` reads one that exists.

    Attributes:
        path: The folder.
        config: Resolved settings, which can be given as `--config` again.
        metrics: Records, one a line.
        log: What was said on the terminal, with times.
        checkpoints: States to resume from.
        model: The model and its tokenizer in Hugging Face form.
        plots: Pictures drawn from the records.
        derived: The run that trains what a search has found.
        events: TensorBoard event files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "training.log"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.plots = path / "plots"
        self.derived = path / "derived"
        self.events = path / "events"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], resume: bool = False, overwrite: bool = False
    ) -> RunFolder:
        """Make the folder for a run; what is there already is kept unless `overwrite` is set.

        `resume` accepts the folder of an earlier run (or none yet, so that one command can be
        repeated until it is through). `overwrite` deletes an earlier run, and only that: a folder
        holding anything a run does not write is refused.
        """
        folder = cls.check(path, resume, overwrite)
        if overwrite and folder.path.is_dir():
            folder._delete()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The run folder {path} cannot be made: {error.strerror}.") from error
        return folder

    @classmethod
    def check(
        cls, path: str | os.PathLike[str], resume: bool = False, overwrite: bool = False
    ) -> RunFolder:
        """Refuse what `create` would refuse, and change nothing: for asking before long work."""
        folder = cls(Path(path))
        if resume and overwrite:
            raise UserError("A run is either resumed or overwritten; give only one of the two.")
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"{path} is a file; choose another folder for the run.")
        if folder.path.is_dir() and any(folder.path.iterdir()):
            if overwrite:
                folder._check_deletable()
            elif not resume:
                raise UserError(
                    f"The run folder {path} exists already; give --resume to go on with it, "
                    "--overwrite to replace it, or another folder."
                )
            elif not folder.is_run():
                raise UserError(
                    f"{path} holds no run that could be resumed; choose another folder."
                )
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of a run that exists."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise UserError(
                f"There is no run folder {path}; give the folder that a run has written."
            )
        if not folder.is_run():
            raise UserError(
                f"{path} is not a run folder: it has neither config.yaml nor metrics.jsonl."
            )
        return folder

    def is_run(self) -> bool:
        """Return whether a run has begun to write here."""
        return any(place.is_file() for place in (self.config, self.metrics, self.log))

    def _check_deletable(self) -> None:
        """Refuse to delete a folder that holds anything a run does not write."""
        names = {place.name for place in vars(self).values() if place != self.path} | FITTED
        # A kill may leave the temporary form of one of our own files behind.
        foreign = sorted(
            entry.name
            for entry in self.path.iterdir()
            if entry.name.removesuffix(".tmp") not in names
        )
        if foreign or not self.is_run():
            reason = f"it holds {foreign[0]}" if foreign else "no run has written there"
            raise UserError(
                f"{self.path} is not overwritten because {reason}; choose another folder."
            )
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(f"{self.path} is the current folder; overwrite it from outside.")

    def _delete(self) -> None:
        # The entries go, the folder stays: it may be a mount point or a symbolic link.
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def model_folder(folder: str) -> Path:
    """Return the folder of a model: that of a finished run, or the folder itself."""
    path = Path(folder)
    path = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (path / "config.json").is_file():
        raise UserError(
            f"There is no model in {folder}: give the folder of a finished run, or one with a "
            "config.json."
        )
    return path


def read_config(run: str) -> dict[str, Any]:
    """Return the settings that a run was made with, as they stand in its file."""
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
    """Return one section of the settings that a run was made with."""
    found = read_config(str(model_folder(run).parent)).get(name)
    if not isinstance(found, dict):
        raise UserError(f"The settings of {run} have no section {name}: leave the run out.")
    return found
