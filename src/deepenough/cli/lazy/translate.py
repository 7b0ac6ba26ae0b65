"""`deepenough lazy translate`: translate lines of text as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepenough.cli.parse import parse
from deepenough.data.text_files import read_input_lines
from deepenough.lazy.evaluation import load_translator, translate_lines
from deepenough.lazy.translate_score import SearchSettings


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
    lines = read_input_lines(settings.file)
    for translation in translate_lines(translator, lines, settings.search, settings.rows):
        print(translation, flush=True)
    return 0
