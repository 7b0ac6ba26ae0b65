"""What a result depends on besides its settings: the versions of the code that made it."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """What a result depends on besides its settings."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepenough"):
        try:  # from the metadata: importing torch for its version would take seconds
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "commit": _commit()}


def _commit() -> str | None:
    """The commit of this package's checkout, marked `-dirty` if changed; None where installed."""
    package = Path(__file__).resolve().parent
    try:
        top = _git(package, "rev-parse", "--show-toplevel")
        # An installed copy may lie inside a repository of its user's, whose commit says nothing.
        if Path(top) / "src" / package.name != package:
            return None
        return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
