"""The command `deepenough`: command name -> function, nothing else."""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys

from deepenough import __version__
from deepenough.cli import COMMANDS
from deepenough.errors import UserError

EXAMPLE = "deepenough search --config configs/demo.yaml --run.folder runs/first"


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is 2 for what the user can put right, 130 for Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"deepenough: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deepenough: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_gone():
            raise
        return 141  # as a shell reports a program whose reader has left


def _reader_gone() -> bool:
    """Whether stdout is a pipe nobody reads any more, as after `deepenough --help | head -1`.

    Asked of the system, because a broken pipe to a worker process must not end in silence.
    """
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:  # what is still buffered goes nowhere, or Python would complain on the way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return gone


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"deepenough {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
        raise UserError(f"There is no command {command}; {advice}")
    try:
        return int(importlib.import_module(f"deepenough.cli.{command}").main(rest))
    except SystemExit as end:  # how a parser leaves after printing its help
        return end.code if isinstance(end.code, int) else 0


def overview() -> str:
    """What `deepenough --help` prints."""
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: deepenough COMMAND [--config FILE] [--NAME VALUE ...]\n\n"
        "Transformers that go only as deep as they need.\n\n"
        f"commands:\n{table}\n\n"
        "options:\n"
        "  -h, --help     show this, or the options of a command: deepenough search --help\n"
        "  -V, --version  show the version\n\n"
        f"example:\n  {EXAMPLE}"
    )


if __name__ == "__main__":
    sys.exit(main())
