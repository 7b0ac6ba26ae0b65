"""Files that are complete or absent: safetensors and JSON, with hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepenough.errors import UserError


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


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
