"""The built-in corpus: the English prose that every Python carries.

The language reference in `pydoc_data.topics` and the docstrings of the standard library, about two
megabytes. Source files are parsed, never imported, in the order of their names, so one Python
version always gives the same text.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from deepenough.data.cache import cache_folder, entry, key_of

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
# One-line docstrings are mostly fragments ("Return the name."), hardly prose.
MIN_CHARACTERS = 80
FILE = "prose.txt"


def prose_file(cache: str | os.PathLike[str] | None = None) -> Path:
    """The corpus as a text file in the cache: parsing the library takes some seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    folder = cache_folder(cache) / "python" / key_of(sys.version, str(root))
    return entry(folder, lambda folder: _write(root, folder / FILE)) / FILE


def _write(root: Path, path: Path) -> None:
    documents = [topics[name] for name in sorted(topics)]
    documents += _docstrings(root)
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for document in dict.fromkeys(documents):  # inherited docstrings occur twice
            for line in document.strip("\n").split("\n"):
                file.write(line.rstrip() + "\n")
            file.write("\n")


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # templates and deliberately broken files
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= MIN_CHARACTERS:
                yield text
