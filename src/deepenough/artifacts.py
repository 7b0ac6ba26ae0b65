"""Everything saved: safetensors and JSON, whole or not at all, checksummed, tied to a model.

A file is written under a temporary name, flushed to disk and renamed, so that a kill or a full disk
leaves the previous one as it was. Everything is checked when it is read. A JSON file carries the
checksum of its own content; an artifact is a safetensors file with a JSON file beside it, which
holds its format, its index and its SHA-256; a folder has the SHA-256 of its files in
`checksums.json` (`seal` writes it, `verify` checks it). Nothing is pickled.

`fingerprint` ties what was fitted to the model it was fitted for. All weights would take seconds to
hash, and minutes for a large model; a few numbers of every tensor show any training step. They are
rounded to bfloat16, so that one model has one fingerprint whether it is loaded in half or in full
precision, and the config counts only where it departs from its class's defaults, so that a default
added by a newer library changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deepenough.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: nothing stops a second writer there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

log = logging.getLogger("deepenough")

#: What stands in a folder beside what is kept there: checksums, and the lock of who writes there.
SEAL, LOCK = "checksums.json", ".lock"
#: Endings of names that only a kill leaves behind; what has the second was whole.
PARTIAL, ASIDE, STAGED = ".tmp", ".old.tmp", ".next"
CHECKSUM = "checksum"
NUM_SAMPLES = 64
# Set by how a model is loaded, saved or asked, not by what it computes.
IGNORED = {
    *("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "tokenizer_class"),
}


class DamagedError(UserError):
    """A file is not what was saved: cut, changed or exchanged."""


def disk_reason(error: BaseException) -> str | None:
    """Return why the system refused to write, None for an error of another kind.

    Libraries written in Rust raise errors of their own, whose text ends with the system's number.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = " ".join(str(error).split())
    return text if "os error" in text else None


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name for a file or folder, which becomes `path` when the block ends well.

    What stood at `path` before is replaced; where the block fails, it is still there. A folder
    cannot be replaced at once: it is moved aside first, from where `restore` takes it back.
    """
    final = Path(path)
    partial, aside = (final.with_name(f"{final.name}{ending}") for ending in (PARTIAL, ASIDE))
    restore(final)
    _remove(partial)
    try:
        yield partial
        for part in (*partial.rglob("*"), partial):  # a file, or a folder with all its files
            _sync(part)
        if partial.is_dir() and final.exists():
            os.replace(final, aside)
        os.replace(partial, final)
        _sync(final.parent)
        _remove(aside)
    finally:
        _remove(partial)
        restore(final)


def restore(path: Path) -> Path:
    """Take back what a kill left aside while it was being replaced; return `path`."""
    aside = path.with_name(f"{path.name}{ASIDE}")
    if aside.exists() and not path.exists():
        with contextlib.suppress(OSError):
            os.replace(aside, path)
    return path


def remove_partial(folder: Path) -> None:
    """Delete what a kill left half-written in a folder, to be called by who has locked it."""
    for aside in folder.rglob(f"*{ASIDE}"):
        restore(aside.with_name(aside.name.removesuffix(ASIDE)))
    for partial in list(folder.rglob(f"*{PARTIAL}")):
        _remove(partial)


_held: set[tuple[Path, int]] = set()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one who writes into a folder; the system frees it when a process dies.

    It is refused while another command, or another thread of this process, is writing there.
    """
    holder = folder.resolve(), threading.get_ident()
    if holder in _held:  # a command within a command
        yield
        return
    handle = _lock(folder)
    _held.add(holder)
    try:
        yield
    finally:
        _held.remove(holder)
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(handle)


def _lock(folder: Path) -> int:
    path = folder / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written to ({error.strerror}): allow it, make "
                "room, or choose another place with --out."
            ) from error
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(
                f"Another command is writing into {folder}: wait until it has ended, or choose "
                "another folder."
            ) from None
        except OSError:  # a file system without locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # who held it has deleted the file since it was opened


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a JSON file with its checksum, whole or not at all; NaN and infinity are refused."""
    plain = json.loads(json.dumps(content, allow_nan=False))
    write_text(path, json.dumps({**plain, CHECKSUM: _digest(plain)}, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` wrote, or a JSON object of someone else; ValueError for others."""
    content = parse_json(path.read_text(encoding="utf-8"))
    known = content.pop(CHECKSUM, None)
    if known is not None and known != _digest(content):
        raise ValueError("its content is not what its checksum says")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text spells; ValueError if it spells none."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, whole or not at all; views of one storage are written apart.

    Where metadata are given, a checksum of them and of the tensors is added.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    if metadata is not None:
        metadata = {**metadata, CHECKSUM: _tensor_digest(whole, metadata)}
    with atomic_path(path) as partial:
        partial.touch()
        usual = partial.stat().st_mode  # as the umask says; safetensors lets nobody else read
        try:
            save_file(whole, partial, metadata)
        except SafetensorError as error:  # a full disk, for all that is given here can be saved
            raise OSError(str(error)) from error
        partial.chmod(usual)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; DamagedError if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        known = metadata.pop(CHECKSUM, None)
        if known is not None and known != _tensor_digest(tensors, metadata):
            raise ValueError("its content is not what its checksum says")
    except (OSError, ValueError, SafetensorError) as error:
        reason = f"{error!s:.200}"
        raise DamagedError(f"{path} is damaged ({reason}): delete it and make it anew.") from error
    return tensors, metadata


def _tensor_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_artifact(path: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any]) -> None:
    """Write tensors to `path`, and beside it a JSON file of that name with index and checksum.

    The tensors wait beside their place until the index is there: a kill between leaves both the
    new index and what it describes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}{STAGED}")
    try:
        save_tensors(staged, tensors)
        write_json(path.with_suffix(".json"), {**index, "sha256": sha256(staged)})
        os.replace(staged, path)
        _sync(path.parent)
    finally:
        _remove(staged)


def load_artifact(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the index that `save_artifact` wrote; ValueError says what is wrong.

    The index must name `kind` as its format, in no later version than `version`.
    """
    index = read_json(path.with_suffix(".json"))
    if index["format"] != kind or index["version"] > version:
        raise ValueError(f"its format is not {kind}, version {version}")
    staged = path.with_name(f"{path.name}{STAGED}")
    for place in (path, staged):
        if place.is_file() and sha256(place) == index["sha256"]:
            return load_tensors(place)[0], index
    raise ValueError(f"{path.name} is not the file it describes")


def seal(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the SHA-256 of the files named, by default of all in a folder, beside them."""
    if names is None:
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        names = (path.as_posix() for path in files if path.name not in (SEAL, LOCK))
    write_json(folder / SEAL, {"files": {name: sha256(folder / name) for name in sorted(names)}})


def verify(folder: Path, without: str = SEAL) -> bool:
    """Check a folder's files against its checksums and return whether it has any.

    Files whose names end with `without` are left out. DamagedError names the first that is not as
    it was saved, and the remedy.
    """
    path = folder / SEAL
    if not path.is_file():
        return False
    remedy = "restore it from a copy, or make it anew"
    if (folder.parent / "checkpoints").is_dir():
        remedy = "repeat the command that trained the model with --resume, which writes it anew"
    try:
        files = dict(read_json(path)["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({error}): {remedy}.") from error
    for name, known in files.items():
        file = folder / name
        if name.endswith(without):
            continue
        if not file.is_file():
            raise DamagedError(f"{file} is missing: {remedy}.")
        if sha256(file) != known:
            raise DamagedError(
                f"{file} is not the file that was saved, as its SHA-256 tells: {remedy}; if it was "
                f"changed on purpose, delete {SEAL} beside it."
            )
    return True


def is_intact(folder: Path) -> bool:
    """Return whether a folder is there, with files as they were saved; damage is said."""
    try:
        return folder.is_dir() and (verify(folder) or True)
    except DamagedError as error:
        reason = str(error).partition(": ")[0]
        log.warning("%s is damaged and made anew (%s)", folder, reason)
        return False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(config: PreTrainedConfig, *modules: nn.Module) -> str:
    """Return 16 hexadecimal digits for a config and the modules whose weights matter."""
    settings = {k: v for k, v in config.to_diff_dict().items() if k not in IGNORED}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for number, module in enumerate(modules):
        for name, weight in module.state_dict().items():
            digest.update(f"{number}.{name}{tuple(weight.shape)}".encode())
            digest.update(_samples(_at_hand(module, name, weight)))
    return digest.hexdigest()[:16]


def _at_hand(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return a weight, read from disk if it waits there."""
    if not weight.is_meta:
        return weight
    from accelerate.utils import align_module_device

    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    with align_module_device(owner):
        found: Tensor = getattr(owner, own)
        return found.detach()


def _samples(weight: Tensor) -> bytes:
    """Return a few numbers of a tensor, rounded to bfloat16, as bytes."""
    import torch

    flat = weight.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // NUM_SAMPLES)].to("cpu", torch.bfloat16)
    return bytes(chosen.contiguous().view(torch.uint8).numpy())


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- the cache -------------------------------------------------------------------------------------
#
# Where prepared data is kept between runs, and how an entry appears there whole or not at all.
#
# An entry is a folder named by the hash of everything that decides its content, so a stale entry
# can never be read. It is filled under a temporary name and renamed into place: a killed process
# leaves only a temporary folder, which the next one deletes, and of two processes that prepare the
# same entry one wins and the other uses what is there. One that does not match its checksums is
# made anew.


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the given folder, else `$XDG_CACHE_HOME/deepenough`, else `~/.cache/deepenough`."""
    if given is not None:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepenough"


def key_of(*parts: str) -> str:
    """Return one hash of several strings; their order and their boundaries count."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def entry(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`; if it is missing or damaged, `fill` a temporary one, which becomes it."""
    try:
        if is_intact(folder):
            if not (folder / SEAL).is_file():  # made before entries had checksums
                with contextlib.suppress(OSError):
                    seal(folder)
            return folder
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with locked(temporary):
                fill(temporary)
                seal(temporary)
                temporary.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except Exception as error:
        if isinstance(error, UserError) or (reason := disk_reason(error)) is None:
            raise
        raise UserError(
            f"The cache {folder.parent} could not be written ({reason}): free some space or name "
            "another folder as cache."
        ) from error
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Delete the temporary folders of processes that were killed: nobody holds their locks."""
    for temporary in folder.glob(".*-*"):
        with contextlib.suppress(UserError, OSError):
            if time.time() - temporary.stat().st_mtime > 2:  # else it may just have been made
                with locked(temporary):
                    shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise


# -- long work in parts ----------------------------------------------------------------------------


class FinishedParts:
    """The finished parts of a long measurement, kept until the whole of it is done.

    A command that was stopped and is repeated finds them and measures only what is missing. They
    lie in `checkpoints/` of the folder that the command writes to, under a hash of everything that
    decides them, so that those of other settings are never read. As a context, they make their
    command the only one that writes into the folder, and are deleted when it ends well.
    """

    def __init__(self, folder: Path | None, kind: str, *decides: object) -> None:
        """Look for the parts of a `kind` of work in a folder; None keeps nothing."""
        self._folder, self._all = folder, None if folder is None else folder / "checkpoints"
        self._lock = contextlib.ExitStack()
        self._kind, self._name = kind, f"{kind}-{key_of(*map(repr, decides))}"

    def __enter__(self) -> Self:
        """Be the only writer of the folder."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the lock says why it cannot be
                self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locked(self._folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Delete the parts if all went well, and the folder if nothing came of it."""
        if kind is None:
            self.close()
        self._lock.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # it holds something
                self._folder.rmdir()

    def get(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a part that was finished before, or `make` it and keep it."""
        if self._all is None:
            return dict(make())
        path = self._all / self._name / f"{name}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or it is damaged
            return dict(json.loads(read_json(path)["part"]))
        text = json.dumps(make())  # a text of its own, which may hold NaN and infinity
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"part": text})
        return dict(json.loads(text))

    def close(self) -> None:
        """Delete all parts of this kind of work: its result is on disk."""
        if self._all is not None:
            for parts in self._all.glob(f"{self._kind}-*"):
                shutil.rmtree(parts, ignore_errors=True)
            with contextlib.suppress(OSError):  # others keep something there
                self._all.rmdir()


def files_of(*folders: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every file in some folders, if they are there."""
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
