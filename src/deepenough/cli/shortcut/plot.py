"""`deepenough shortcut plot`: the same pictures as `deepenough plot`, under the method's name."""

from __future__ import annotations

from deepenough.cli.plot import draw


def main(argv: list[str]) -> int:
    return draw("shortcut plot", argv)
