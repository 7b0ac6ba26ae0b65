"""Lines of text files, streamed, and which split of a corpus each file belongs to.

Lines end at a line feed alone (a carriage return before it is dropped), because `str.splitlines`
would also cut at form feeds and exotic separators and so change the line count of a corpus.
"""

from __future__ import annotations

import codecs
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from deepenough.errors import UserError

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".raw"})
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
# A file without line feeds must not be read whole; a line longer than this is cut into several.
MAX_LINE_BYTES = 1 << 20

_warned: set[Path] = set()


def read_lines(paths: Iterable[Path]) -> Iterator[str]:
    """Yield all lines of the files without their ends; bytes that are no UTF-8 are replaced."""
    for path in paths:
        yield from _lines_of(path)


def _lines_of(path: Path) -> Iterator[str]:
    num_invalid = 0
    with _open(path) as file:
        start = file.peek(3)
        check_utf8(start, path)
        if start.startswith(codecs.BOM_UTF8):  # a byte order mark is no text
            file.read(len(codecs.BOM_UTF8))
        rest = b""  # the tail of a cut that fell inside a character
        while chunk := file.readline(MAX_LINE_BYTES):
            raw, rest = rest + chunk, b""
            if raw.endswith(b"\n"):
                raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
            elif len(chunk) == MAX_LINE_BYTES:
                cut = _character_boundary(raw)
                raw, rest = raw[:cut], raw[cut:]
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError:
                num_invalid += 1
                yield raw.decode("utf-8", errors="replace")
        if rest:
            num_invalid += 1
            yield rest.decode("utf-8", errors="replace")
    if num_invalid and path not in _warned:
        _warned.add(path)
        logger.warning(
            "%s: %d line%s had bytes that are not UTF-8; they were replaced by U+FFFD.",
            path,
            num_invalid,
            "" if num_invalid == 1 else "s",
        )


def check_utf8(start: bytes, name: str | Path) -> None:
    """Refuse UTF-16 text by its first bytes: replacing what is not UTF-8 would leave nothing."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name} is UTF-16 text: save it as UTF-8.")


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _character_boundary(raw: bytes) -> int:
    """Return the last position near the end at which a UTF-8 character may start."""
    for back in range(1, 5):
        if raw[-back] & 0xC0 != 0x80:
            return len(raw) - back
    return len(raw)


def text_files_under(folder: Path) -> list[Path]:
    """Return every text file in the folder and below it, hidden ones left out, in a fixed order."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in TEXT_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def group_by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the split their names speak of (`train.txt`, `wiki.valid.tokens`).

    Where no file is named for training, names mean nothing and all files are training text.
    """
    paths = list(paths)
    named: dict[str, list[Path]] = {}
    for path in paths:
        words = re.split(r"[._-]", path.name.lower())
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
        if split is not None:
            named.setdefault(split, []).append(path)
    return named if "train" in named else {"train": paths}


logger = logging.getLogger("deepenough")


def read_input_lines(file: str | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input, without their ends."""
    if file is None:
        yield from _decoded(sys.stdin.buffer, "standard input")
        return
    try:
        with open(file, "rb") as lines:
            yield from _decoded(lines, file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield each line decoded; what is no UTF-8 is replaced, with one warning."""
    told = False
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            check_utf8(raw, name)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not told and "\ufffd" in line:
            told = True
            logger.warning("%s, line %d: what is not UTF-8 was replaced.", name, number)
        yield line
