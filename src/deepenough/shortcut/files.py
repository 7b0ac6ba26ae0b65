"""Shortcuts on disk: `shortcuts.json` and safetensors beside it, with nothing to execute.

`shortcuts.json` says what the maps are of and names the files with their hashes, so that a
truncated or altered file is noticed before it is used. Maps are tensors `A.i.j`, biases `b.i.j`,
tuned maps `tuned.A.i` and `tuned.b.i`. A large set of maps is spread over several files. Tensors
read back are mapped from disk and come into memory when they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepenough.errors import UserError

INDEX = "shortcuts.json"
FORMAT, VERSION = "deepenough-shortcuts", 1
_FILE_BYTES = 5_000_000_000


def write(folder: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any]) -> None:
    """Write all files, the index after those it names, in place of shortcuts that are there.

    The tensors may be mapped from the very files that are replaced.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = _parts(tensors)
        files = {}
        for number, names in enumerate(parts, start=1):
            of = "" if len(parts) == 1 else f"-{number:05d}-of-{len(parts):05d}"
            path = folder / f"shortcuts{of}.safetensors"
            save_tensors(path, {name: tensors[name] for name in names})
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        content = {"format": FORMAT, "version": VERSION, **index, "files": files}
        write_json(folder / INDEX, content)
        for stale in folder.glob("shortcuts*.safetensors"):
            if stale.name not in files:
                stale.unlink()
    except (OSError, SafetensorError) as error:
        raise UserError(f"Shortcuts cannot be written to {folder}: {error}.") from error


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and index of a folder, whose files are as they were written."""
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder} holds no shortcuts: there is no {INDEX}; give the folder that "
            "Shortcuts.save_pretrained wrote."
        )
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if index["version"] > VERSION:
            raise UserError(
                f"{folder / INDEX} was written by a newer deepenough: upgrade this one to read it."
            )
        files = {str(name): str(file["sha256"]) for name, file in index["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / INDEX} cannot be read ({error}): fit or download the shortcuts again."
        ) from error
    tensors: dict[str, Tensor] = {}
    for name, expected in files.items():
        path = folder / name
        if path.name != name or not path.is_file():
            raise UserError(f"{path} is missing: fit or download the shortcuts again.")
        if sha256(path) != expected:
            raise UserError(
                f"{path} is not the file that {INDEX} describes, but was truncated or altered: "
                "fit or download the shortcuts again."
            )
        tensors |= load_tensors(path)[0]
    return tensors, index


def find_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """A folder of shortcuts: on this disk, or downloaded from the hub."""
    if Path(name).exists():
        return Path(name)
    if os.path.isabs(name) or str(name).startswith(".") or str(name).count("/") > 1:
        raise UserError(
            f"There is no folder {name}: give one that Shortcuts.save_pretrained wrote."
        )
    try:
        return Path(
            snapshot_download(
                str(name), revision=revision, allow_patterns=[INDEX, "shortcuts*.safetensors"]
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name} is neither a folder here nor shortcuts that the hub gives "
            f"({type(error).__name__}): give a folder, or look at the name and the network."
        ) from error


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """One safetensors file, complete or absent."""
    partial = path.with_name(path.name + ".tmp")
    # Views of one storage are written apart.
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, partial, metadata)
    _sync(partial)
    os.replace(partial, path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of one safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it and make it anew.") from error


def write_described(path: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any]) -> None:
    """One safetensors file, and beside it a JSON file of that name with the index and its hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})
    write_json(path.with_suffix(".json"), {**index, "sha256": sha256(path)})


def read_described(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and index of what `write_described` wrote; a `ValueError` says what is wrong."""
    index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if index["format"] != kind or index["version"] > version:
        raise ValueError(f"its format is not {kind}, version {version}")
    if sha256(path) != index["sha256"]:
        raise ValueError(f"{path.name} is not the file it describes")
    return load_tensors(path)[0], index


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON file, complete or absent."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _sync(partial)
    os.replace(partial, path)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
