"""`deepenough ponder predict`: label lines of text as they come, one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from deepenough.cli.parse import parse
from deepenough.data.text_files import read_input_lines
from deepenough.ponder.evaluation import ExitSettings, predict
from deepenough.ponder.texts import Text


@dataclass
class PredictSettings:
    """Predict"""

    run: str
    """Folder of a finished training."""

    file: str | None = None
    """File with a text on every line, the second of a pair after a tab; by default standard
    input."""

    rows: int = 32
    """Texts that are worked on at once; a finished one makes room for the next."""

    exit: ExitSettings = field(default_factory=ExitSettings)


def main(argv: list[str]) -> int:
    settings = parse(
        "ponder predict",
        PredictSettings,
        argv,
        description="Label texts: label, probability and passes of each line, as JSON lines.",
        example="deepenough ponder predict runs/ponder --file reviews.txt",
        positional=["run", "file"],
    )
    for answer in predict(settings.run, _texts(settings.file), settings.exit, rows=settings.rows):
        print(json.dumps(answer), flush=True)
    return 0


def _texts(file: str | None) -> Iterator[Text]:
    for line in read_input_lines(file):
        first, tab, second = line.partition("\t")
        yield (first, second) if tab else first
