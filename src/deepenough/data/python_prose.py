"""The built-in corpus: the English prose that every Python carries.

The language reference in `pydoc_data.topics` and the docstrings of the standard library, about two
megabytes. Source files are parsed, never imported, in the order of their names, so one Python
version always gives the same text.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
# One-line docstrings are mostly fragments ("Return the name."), hardly prose.
MIN_CHARACTERS = 80


def prose_lines() -> Iterator[str]:
    """The lines of the corpus; documents are separated by a blank line."""
    return iter(_prose())


@cache
def _prose() -> tuple[str, ...]:
    documents = [topics[name] for name in sorted(topics)]
    documents += _docstrings(Path(sysconfig.get_path("stdlib")))
    lines: list[str] = []
    for document in dict.fromkeys(documents):
        lines += [line.rstrip() for line in document.strip("\n").split("\n")]
        lines.append("")
    return tuple(lines)


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
