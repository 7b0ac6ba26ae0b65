"""`deepenough report`: all that runs and comparisons have to show, in one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from deepenough.errors import UserError

EXAMPLES = """examples:
  deepenough report runs/demo/* -o runs/demo/report.html
  deepenough report runs/par runs/compare -o paper/report.md"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    folders = list({Path(path).resolve(): path for path in given.runs}.values())
    if not folders:
        raise UserError("Name at least one run folder, as in deepenough report runs/first.")

    # Here, not above: matplotlib takes a second to load, which --help need not wait for.
    from deepenough.report.page import read_sources, write_page
    from deepenough.report.page_markdown import write_markdown

    if given.out is not None and given.out.is_dir():
        raise UserError(f"{given.out} is a folder: name a file, as in -o {given.out}/report.html.")
    sources = read_sources(folders)
    for note in sources.notes:
        print(f"deepenough: note: {note}", file=sys.stderr)
    markdown = given.format == "markdown" if given.format else _is_markdown(given.out)
    if markdown:
        out = given.out or Path("report.md")
        print(*write_markdown(sources, out, given.title), sep="\n")
    else:
        print(write_page(sources, given.out or Path("report.html"), given.title))
    return 0


def _is_markdown(out: Path | None) -> bool:
    return out is not None and out.suffix.lower() in (".md", ".markdown")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="deepenough report",
        description="Put all that runs have recorded, and comparisons measured, into one page that "
        "opens without a network, or into Markdown with pictures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="folder of a run, or of deepenough compare"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="file to write (default: report.html)"
    )
    parser.add_argument(
        "--format",
        choices=("html", "markdown"),
        help="html, or markdown with PNG; by default as the file's name ends",
    )
    parser.add_argument("--title", default="", help="heading; by default the names of the runs")
    return parser
