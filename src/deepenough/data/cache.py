"""Where prepared data is kept between runs, and how an entry appears there whole or not at all.

An entry is a folder named by the hash of everything that decides its content, so a stale entry can
never be read. It is filled under a temporary name and renamed into place: a killed process leaves
only a temporary folder, and of two processes that prepare the same entry one wins and the other
uses what is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from deepenough.errors import UserError


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
