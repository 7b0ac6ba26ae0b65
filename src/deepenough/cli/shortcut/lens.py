"""`deepenough shortcut lens`: what every layer would say after every token of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from deepenough.cli.parse import parse


@dataclass
class LensSettings:
    """Lens"""

    prompt: str
    """Text to look at."""

    run: str = "runs/shortcut"
    """Run folder that `deepenough shortcut fit` has written."""

    mode: str | None = None
    """Maps to use: id, mat, affine or tuned; by default those of the run."""

    every: int = 0
    """Print every so many layers; 0 for as many as fit a screen. The pictures have all."""


def main(argv: list[str]) -> int:
    settings = parse(
        "shortcut lens",
        LensSettings,
        argv,
        description="Show, for a prompt, the word each layer predicts after each token, and write\n"
        "it as a page and a picture.",
        example='deepenough shortcut lens "The capital of France is" --run runs/shortcut',
        positional=["prompt"],
    )
    from deepenough.report import read_runs
    from deepenough.report.lens import write_lens
    from deepenough.runs import RunFolder
    from deepenough.shortcut.study import lens_run

    values = lens_run(settings.run, settings.prompt, settings.mode).values
    last = len(values["layers"]) - 1
    every = settings.every or max(1, last // 10)
    heads = [Column(Text(repr(token)[1:-1])) for token in values["tokens"]]
    table = Table("layer", *heads, box=None)
    for layer in sorted({*range(0, last + 1, every), last}):
        words = [
            Text(repr(word)[1:-1], style="bold" if agrees else "dim")
            for word, agrees in zip(values["words"][layer], values["agrees"][layer], strict=True)
        ]
        table.add_row(str(layer), *words)
    Console().print(table)
    print("bold: the word of the last layer")
    run = read_runs([settings.run])[0]
    print(*write_lens(run, RunFolder.open(settings.run).plots), sep="\n")
    return 0
