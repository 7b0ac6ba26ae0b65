"""Lines of text as users give them: from a file, or from standard input as they come."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator

from deepenough.data.text_files import check_utf8
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")


def read_lines(file: str | None) -> Iterator[str]:
    """The lines of a file, or of standard input, without their ends."""
    if file is None:
        yield from _decoded(sys.stdin.buffer, "standard input")
        return
    try:
        with open(file, "rb") as lines:
            yield from _decoded(lines, file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """One for every line, whatever stands in it; what is no UTF-8 is replaced, and told once."""
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
