"""`deepenough plot`, provisionally: the shared command of `deepenough.report.commands`."""

from __future__ import annotations

from deepenough.cli import run_command
from deepenough.report.commands import plot_command


def main(argv: list[str]) -> int:
    """Draw the figures of a run."""
    return draw("plot", argv)


def draw(command: str, argv: list[str]) -> int:
    """Draw the figures of a run under another name of the command."""
    return run_command(plot_command("par"), command, argv)
