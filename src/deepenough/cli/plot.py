"""`deepenough plot`: the pictures of one run, or the curves of several over one another."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from deepenough.errors import UserError

EXAMPLES = """examples:
  deepenough {0} runs/first                          pictures of one run, in runs/first/plots
  deepenough {0} runs/first runs/second --out both   their curves over one another"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def main(argv: list[str]) -> int:
    return draw("plot", argv)


def draw(command: str, argv: list[str]) -> int:
    """Draw, and print the path of every file written."""
    given = _parser(command).parse_args(argv)
    # The same folder twice would be one line drawn over itself.
    folders = list({Path(path).resolve(): Path(path) for path in given.runs + given.run}.values())
    if not folders:
        raise UserError("Name at least one run folder, as in deepenough plot runs/first.")
    if len(folders) > 1 and given.out is None:
        raise UserError("Several runs are drawn over one another; say with --out FOLDER where to.")

    # Here, not above: matplotlib takes a second to load, which --help need not wait for.
    from deepenough.report import read_runs, write_comparison, write_figures
    from deepenough.runs import RunFolder

    runs = read_runs(folders)
    for note in (note for run in runs for note in run.notes):
        print(f"deepenough: note: {note}", file=sys.stderr)
    if len(runs) > 1:
        written = write_comparison(runs, given.out)
    else:
        written = write_figures(runs[0], given.out or RunFolder(folders[0]).plots)
    print(*written, sep="\n")
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"deepenough {command}",
        description="Draw what a run has recorded: block probabilities (also as they moved), "
        "training curves, the architecture; what each layer knows, and what early exit saves.",
        epilog=EXAMPLES.format(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run folder; several are compared")
    parser.add_argument(
        "--run", metavar="RUN", action="append", default=[], help="the same, as an option"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="where to write (default: RUN/plots)"
    )
    return parser
