"""The command `deepenough`: command name -> function, nothing else."""

from __future__ import annotations

import difflib
import os
import select
import sys
from collections.abc import Mapping

from deepenough import __version__
from deepenough.cli import COMMANDS, find_command, run_command
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
    command, rest = find_command(words)
    if command not in COMMANDS:
        return _refuse(command, rest)
    try:
        return run_command(command, rest)
    except SystemExit as end:  # how a parser leaves after printing its help
        return end.code if isinstance(end.code, int) else 0


def _refuse(group: str, rest: list[str]) -> int:
    """Say which commands there are, for the first word of several of them, or one unknown."""
    members = {name: text for name, text in COMMANDS.items() if name.startswith(f"{group} ")}
    if members and (not rest or rest[0] in ("-h", "--help", "help")):
        print(overview(members))
        return 0
    command = f"{group} {rest[0]}" if members else group
    close = difflib.get_close_matches(command, members or COMMANDS, n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are {_names(members)}."
    raise UserError(f"There is no command {command}; {advice}")


def _names(members: Mapping[str, str]) -> str:
    """Commands in a row, those of a group by its name unless they are all there is."""
    return ", ".join(members or dict.fromkeys(name.split()[0] for name in COMMANDS))


def overview(commands: Mapping[str, str] = COMMANDS) -> str:
    """What `deepenough --help` prints; or `deepenough GROUP --help`, of its commands."""
    one, example = "search", EXAMPLE
    if commands is not COMMANDS:
        one = next(iter(commands))
        example = f"deepenough {one} --help"
    width = max(map(len, commands))
    table = "\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items())
    return (
        "usage: deepenough COMMAND [--config FILE] [--NAME VALUE ...]\n\n"
        "Transformers that go only as deep as they need.\n\n"
        f"commands:\n{table}\n\n"
        "options:\n"
        f"  -h, --help     show this, or the options of a command: deepenough {one} --help\n"
        "  -V, --version  show the version\n\n"
        f"example:\n  {example}"
    )


if __name__ == "__main__":
    sys.exit(main())
