"""What a run leaves behind: a folder of files with fixed names, and one line per measurement.

`metrics.jsonl` is the interface between a run and everything that looks at it later: training
appends `Record`s, reports read them, and neither knows the other. Two choices follow from that:

- A run may be killed at any moment. Every record is written as one line in one call, a line torn by
  a kill is mended before the next append, and a reader skips (and counts) what it cannot read.
- Values come back as they went in, so NaN and infinity are written as Python's `json` writes them
  (`NaN`, `Infinity`): a loss that diverged must not look like a missing one.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import time as clock
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from deepenough import artifacts
from deepenough.config import CHECKSUM_LINE, load_yaml
from deepenough.errors import UserError

log = logging.getLogger("deepenough")

#: Trained models that come with the package deepenough-models.
SHIPPED = ("par-wikitext2", "lazy-multi30k", "ponder-sst2")
_OWN_KEYS = ("step", "kind", "time")
#: Last key of a record's line: a checksum of all before it.
_CHECK = ', "crc": "'
#: Everything that a command of ours writes into a run folder.
_WRITTEN = re.compile(
    r"((derived|tuning)/)*(config\.yaml|metrics\.(jsonl|part)|training\.log|\.lock"
    r"|hypotheses\.txt|sweep\.csv|bench\.json|profile\.json|report\.html"
    r"|frontier\w*(\.data)?\.(json|png|pdf|svg)|events/events\.out\.tfevents\.[^/]+"
    r"|(checkpoints|model|shortcuts|affine)/.*\.(safetensors|json|txt|model|jinja)"
    r"|plots/[^/]+\.(png|pdf|svg|gif|json)|results\.(safetensors|csv)|sentences\.txt"
    r"|(events|checkpoints|model|shortcuts|affine|plots)/)"
)


@dataclass(frozen=True)
class Record:
    """One measurement: at which step, of what kind, which values, and when (seconds since 1970)."""

    step: int
    kind: str
    values: dict[str, Any]
    time: float = field(default_factory=clock.time)

    def __post_init__(self) -> None:
        if taken := [key for key in (*_OWN_KEYS, "crc") if key in self.values]:
            raise ValueError(f"a record's values cannot be named {taken[0]!r}, a key of its own")

    def to_json(self) -> str:
        """Return the record as one line without its line end."""
        own = {"step": self.step, "kind": self.kind, "time": self.time}
        line = json.dumps(own | self.values, default=_plain)
        return f'{line[:-1]}{_CHECK}{zlib.crc32(line.encode()):08x}"}}'

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Read one line; ValueError if it is not a record."""
        text = line if isinstance(line, str) else line.decode()
        content = artifacts.parse_json(text)
        known = content.pop("crc", None)
        if known is not None:
            whole = text.rpartition(_CHECK)[0] + "}"
            if known != f"{zlib.crc32(whole.encode()):08x}":
                raise ValueError("a record is not what its checksum says")
        try:
            step, kind, time = (content.pop(key) for key in _OWN_KEYS)
        except KeyError as error:
            raise ValueError(f"a record needs the key {error}") from None
        right = type(step) is int and isinstance(kind, str) and type(time) in (int, float)
        if not right or not 0 <= step < 2**53 or not abs(time) < 2**53:
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

    def truncate_after(self, step: int) -> None:
        """Drop the records later than `step`, so that a resumed run does not say things twice.

        Lines that cannot be read stay as they are.
        """
        if self.path.exists():
            replace_records(self.path, [], lambda record: record.step > step)


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append a single record to a metrics file, for code that writes only now and then."""
    Metrics(path).append(record)


def replace_records(
    path: Path, records: Sequence[Record], replaced: Callable[[Record], bool] | None = None
) -> None:
    """Write records, all or none, in the place of those that are `replaced`.

    By default these are all of the same kinds.
    """
    kinds = {record.kind for record in records}
    replaced = replaced or (lambda record: record.kind in kinds)
    with artifacts.atomic_path(path) as partial, open(partial, "wb") as file:
        for line, record in _lines(path) if path.exists() else ():
            if record is None or not replaced(record):
                file.write(line if line.endswith(b"\n") else line + b"\n")
        for record in records:
            file.write(record.to_json().encode() + b"\n")


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Return all records of a metrics file in order, and how many corrupted lines were skipped.

    Skipping is said, since what follows from the rest may be other than the run had found.
    """
    if not Path(path).is_file():
        raise UserError(
            f"There is no metrics file {path}; give the folder of a run that has started."
        )
    found = [record for _, record in _lines(Path(path))]
    records = [record for record in found if record is not None]
    num_corrupted = len(found) - len(records)
    if num_corrupted:
        log.warning("%d line(s) of %s are damaged and skipped.", num_corrupted, path)
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
    content = path.read_bytes() if path.is_file() else b""
    torn = content.rpartition(b"\n")[2]
    if not torn:
        return
    with open(path, "ab") as file:
        if _record_or_none(torn) is not None:
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(torn))


class RunFolder:
    """The folder of one run and the places in it.

    `RunFolder(path)` names the places without touching the disk, `create` starts or resumes a run
    there, `open` reads one that exists.
    """

    begun: ClassVar[set[Path]] = set()
    """Folders in which this process has started or resumed a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # resolved settings, to be given as `--config` again
        self.metrics = path / "metrics.jsonl"  # records, one a line
        self.log = path / "training.log"  # what was said on the terminal, with times
        self.checkpoints = path / "checkpoints"  # states to resume from
        self.model = path / "model"  # with its tokenizer, in Hugging Face form
        self.plots = path / "plots"  # pictures drawn from the records
        self.derived = path / "derived"  # the run that trains what a search has found
        self.events = path / "events"  # files of TensorBoard

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], resume: bool = False, overwrite: bool = False
    ) -> Self:
        """Make the folder for a run; what is there already is kept unless `overwrite` is set.

        `resume` accepts the folder of an earlier run (or none yet, so that one command can be
        repeated until it is through). `overwrite` deletes an earlier run, and only that: a folder
        holding anything a run does not write is refused.
        """
        folder = cls.check(path, resume, overwrite)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with folder.lock():
                artifacts.remove_partial(folder.path)
                if overwrite:
                    folder._delete()
        except OSError as error:
            raise UserError(
                f"The run folder {path} cannot be made ({error.strerror}): choose another folder."
            ) from error
        cls.begun.add(folder.path.resolve())
        return folder

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Be the only run that writes into the folder; of several processes the first is."""
        is_main = os.environ.get("RANK", "0") == "0"
        return artifacts.locked(self.path) if is_main else contextlib.nullcontext()

    @classmethod
    def check(
        cls, path: str | os.PathLike[str], resume: bool = False, overwrite: bool = False
    ) -> Self:
        """Refuse what `create` would refuse, and change nothing: for asking before long work."""
        folder = cls(Path(path))
        if resume and overwrite:
            raise UserError("A run is either resumed or overwritten; give only one of the two.")
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"{path} is a file; choose another folder for the run.")
        # A kill may leave no more than the temporary form of a first file: nothing has begun.
        left = (".tmp", ".lock")
        entries = folder.path.iterdir() if folder.path.is_dir() else ()
        if any(not entry.name.endswith(left) for entry in entries):
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
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return the folder of a run that exists."""
        folder = cls(find_run(path))
        if not folder.path.is_dir():
            raise UserError(
                f"There is no run folder {path}; give the folder that a run has written."
            )
        if not folder.is_run():
            raise UserError(
                f"{path} is not a run folder, as it has neither config.yaml nor metrics.jsonl: "
                "give one that a run has written."
            )
        return folder

    def is_run(self) -> bool:
        """Return whether a run has begun to write here."""
        return any(place.is_file() for place in (self.config, self.metrics, self.log))

    def settings(self) -> Path:
        """Return the file of the settings; UserError where it is not as the run wrote it."""
        try:
            text = self.config.read_text(encoding="utf-8")
            first, _, rest = text.partition("\n")
            known = first.removeprefix(CHECKSUM_LINE)
            is_changed = known not in (first, hashlib.sha256(rest.encode()).hexdigest())
            if is_changed or not isinstance(load_yaml(self.config), dict):
                raise ValueError("the settings are not those of the run")
        except (OSError, ValueError, UserError) as error:
            raise UserError(
                f"{self.config} cannot be read, or is not as the run wrote it, so nothing tells "
                f"what {self.path} was trained on: restore it (if you changed it on purpose, "
                "delete its first line), leave the run out, or make it again."
            ) from error
        return self.config

    def _check_deletable(self) -> None:
        """Refuse to delete a folder that holds anything a run does not write."""
        names = sorted(
            path.relative_to(self.path).as_posix() + "/" * path.is_dir()
            for path in self.path.rglob("*")
            if path.is_symlink() or not path.is_dir()
        )
        # A kill may leave the temporary form of one of our own files behind.
        endings = re.compile(r"((\.old)?\.tmp|\.next)(?=/|$)")
        foreign = [name for name in names if not _WRITTEN.fullmatch(endings.sub("", name))]
        if foreign or not self._is_own():
            reason = f"it holds {foreign[0]}" if foreign else "no run has written there"
            raise UserError(
                f"{self.path} is not overwritten because {reason}; choose another folder."
            )
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(f"{self.path} is the current folder; overwrite it from outside.")

    def _is_own(self) -> bool:
        """Return whether what is here was written by a run, not by another program."""
        if self.config.is_file():
            return b"\nprovenance:" in self.config.read_bytes()
        if self.metrics.is_file():
            return any(record for _, record in _lines(self.metrics))
        said = self.log.read_bytes()[:200] if self.log.is_file() else b"nothing"
        return not said or b" INFO " in said  # a run was killed before its first record

    def _delete(self) -> None:
        # The entries go, the folder stays: it may be a mount point or a symbolic link.
        for entry in self.path.iterdir():
            if entry.name == artifacts.LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def find_run(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a run, given its path or the name of a trained model that ships.

    The weights of those that ship have 16 bits. They are unpacked into the cache with 32, as a run
    folder like any other, which then keeps what is measured and drawn of it.
    """
    path = Path(name)
    if os.fspath(name) not in SHIPPED or path.exists():
        return path
    package = package_folder("deepenough_models")
    if package is None:
        raise UserError(
            f"{name} is a trained model of the package deepenough-models, which is not installed: "
            "pip install --no-deps deepenough-models, or give the folder of a run."
        )
    source = package / name
    if not source.is_dir():
        raise UserError(
            f"The installed deepenough-models has no {name}: give the folder of a run of your own."
        )
    if not artifacts.verify(source / "model"):
        raise UserError(
            f"{source} is not whole: pip install --no-deps --force-reinstall deepenough-models."
        )
    checksums = (source / "model" / "checksums.json").read_text(encoding="utf-8")
    key = artifacts.key_of(checksums)[:8]
    folder = artifacts.cache_folder() / "models" / f"{name}-{key}" / path
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with artifacts.atomic_path(folder) as temporary:
            shutil.copytree(source, temporary)
            _widen(temporary / "model" / "model.safetensors")
            artifacts.seal(temporary / "model")
    return folder


def package_folder(module: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None if there is none."""
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _widen(weights: Path) -> None:
    """Rewrite a file of 16-bit weights as 32-bit ones."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def model_folder(folder: str) -> Path:
    """Return the folder of a model, its small files checked: of a finished run, or the folder."""
    path = find_run(folder)
    artifacts.restore(path / "model")
    path = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (path / "config.json").is_file():
        raise UserError(
            f"There is no model in {folder}: give the folder of a finished run, or one with a "
            "config.json."
        )
    artifacts.verify(path, without=".safetensors")  # which are checked when they are loaded
    return path


def read_config(run: str) -> dict[str, Any]:
    """Return the settings that a run was made with, as they stand in its file."""
    content: dict[str, Any] = load_yaml(RunFolder.open(run).settings())
    return content


def read_section(run: str, name: str) -> dict[str, Any]:
    """Return one section of the settings that a run was made with."""
    found = read_config(str(model_folder(run).parent)).get(name)
    if not isinstance(found, dict):
        raise UserError(f"The settings of {run} have no section {name}: leave the run out.")
    return found
