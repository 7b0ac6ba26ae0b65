"""Provisional: the parse function of commands that still stand in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from deepenough.config import Command

S = TypeVar("S")


def parse(
    command: str,
    settings_class: type[S],
    argv: list[str],
    description: str,
    example: str,
    positional: Sequence[str] = (),
) -> S:
    """Return the settings of `command` from its words."""
    from deepenough.cli import parse_command

    declared = Command(
        command, "", settings_class, lambda _: 0, description, example, tuple(positional)
    )
    return parse_command(declared, command, argv)  # type: ignore[no-any-return]
