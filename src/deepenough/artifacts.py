"""Everything saved: safetensors and JSON, whole or not at all, checksummed, tied to a model.

A file is written under a temporary name, flushed to disk and renamed, so that a kill or a full disk
leaves the previous one as it was. An artifact is a safetensors file with a JSON file beside it,
which holds its format, its index and its SHA-256; nothing is pickled.

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
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepenough.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

NUM_SAMPLES = 64
# Set by how a model is loaded, saved or asked, not by what it computes.
IGNORED = {
    *("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "tokenizer_class"),
}


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name for a file or folder, which becomes `path` when the block ends well.

    What stood at `path` before is replaced; where the block fails, it is still there.
    """
    final = Path(path)
    partial = final.with_name(f"{final.name}.tmp")
    _remove(partial)
    try:
        yield partial
        _flush(partial)
        if partial.is_dir():
            _remove(final)
        os.replace(partial, final)
        _sync(final.parent)
    finally:
        _remove(partial)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; NaN and infinity are refused."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, whole or not at all; views of one storage are written apart."""
    from safetensors.torch import save_file

    with atomic_path(path) as partial:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, partial, metadata)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        UserError: The file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it and make it anew.") from error


def save_artifact(path: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any]) -> None:
    """Write tensors to `path`, and beside it a JSON file of that name with index and checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})
    write_json(path.with_suffix(".json"), {**index, "sha256": sha256(path)})


def load_artifact(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the index that `save_artifact` wrote.

    Args:
        path: The safetensors file.
        kind: The `format` that its index must name.
        version: The newest version of that format which can be read.

    Raises:
        ValueError: Says what is wrong with the files.
    """
    index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if index["format"] != kind or index["version"] > version:
        raise ValueError(f"its format is not {kind}, version {version}")
    if sha256(path) != index["sha256"]:
        raise ValueError(f"{path.name} is not the file it describes")
    return load_tensors(path)[0], index


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
            digest.update(_samples(weight))
    return digest.hexdigest()[:16]


def _samples(weight: Tensor) -> bytes:
    """Return a few numbers of a tensor, rounded to bfloat16, as bytes."""
    import torch

    flat = weight.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // NUM_SAMPLES)].to("cpu", torch.bfloat16)
    return bytes(chosen.contiguous().view(torch.uint8).numpy())


def _flush(path: Path) -> None:
    """Wait until a file, or a folder with all its files, is on the disk."""
    for part in path.rglob("*") if path.is_dir() else ():
        _sync(part)
    _sync(path)


def _sync(path: Path) -> None:
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
# leaves only a temporary folder, and of two processes that prepare the same entry one wins and
# the other uses what is there.


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
    """Return `folder`; if it is missing, `fill` a temporary one first, which becomes it."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(temporary)
            temporary.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"The cache {folder.parent} could not be written ({error.strerror or error}): "
            "free some space or name another folder as cache."
        ) from error
    return folder


def _put(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise
