"""`deepenough lazy translate`: translate lines of text as they come."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from deepenough.cli.parse import parse
from deepenough.errors import UserError
from deepenough.train.lazy_use import load_translator, translate_lines
from deepenough.train.translate_score import SearchSettings

logger = logging.getLogger("deepenough")


@dataclass
class TranslateSettings:
    """Translate"""

    run: str
    """Folder of a finished training."""

    file: str | None = None
    """File with a sentence on every line; by default standard input."""

    rows: int = 32
    """Lines that are translated at once; 1 answers every line as soon as it is read."""

    search: SearchSettings = field(default_factory=SearchSettings)


def main(argv: list[str]) -> int:
    settings = parse(
        "lazy translate",
        TranslateSettings,
        argv,
        description="Translate sentences, one a line, with a finished model.",
        example="deepenough lazy translate runs/lazy-multi30k < sentences.txt",
        positional=["run", "file"],
    )
    translator = load_translator(settings.run)
    lines = _lines(settings.file)
    for translation in translate_lines(translator, lines, settings.search, settings.rows):
        print(translation, flush=True)
    return 0


def _lines(file: str | None) -> Iterator[str]:
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
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not told and "\ufffd" in line:
            told = True
            logger.warning("%s, line %d: what is not UTF-8 was replaced.", name, number)
        yield line
