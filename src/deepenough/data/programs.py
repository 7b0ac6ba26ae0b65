"""Learning to Execute (arXiv 1410.4615): short programs and what they print, as pairs of text.

Three tasks, of chosen difficulty, from a seed:

- `addition`: `print(48213+905).`, numbers of up to `length` digits.
- `copy`: a number of `length` digits, to be said again.
- `program`: assignments, sums, products with a small number, conditions and loops, put into one
  another up to `nesting` deep; the numbers in them have up to `length` digits.

As in the paper, a program has one line a statement and ends in `print(...)`; here lines are joined
by `;`, so that a program is one line of a file, and a loop of `k` rounds is written out as
`for x in range(k):v+=c`, whose effect a few additions give. What a program prints is found by
running the same operations, never by `eval`. Difficulty mixes as in the paper's best curriculum:
length and nesting of each sample are drawn up to the limits, not fixed at them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepenough.data.translation import Pair
from deepenough.errors import UserError

MAX_ROUNDS = 9
MAX_FACTOR = 9
NAMES = "abcdefghijklmnopqrstuvwyz"
"""Of variables; x counts the rounds of loops."""


@dataclass
class ProgramData:
    """Programs to execute"""

    task: Literal["addition", "copy", "program"] = "addition"
    """addition of two numbers, copy of one, or program: whole programs with control flow."""

    length: int = 3
    """Digits of a number at most."""

    nesting: int = 2
    """Operations that a program puts into one another at most."""

    fixed: bool = False
    """Let all samples have the full length and nesting instead of drawing them up to it."""

    def check(self) -> None:
        for name in ("length", "nesting"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name} must be at least 1: got {getattr(self, name)}.")
        if self.nesting > len(NAMES):
            raise UserError(
                f"data.nesting is {self.nesting}, but a program has only {len(NAMES)} names for "
                "variables: ask for less."
            )


def make_pairs(data: ProgramData, num: int, seed: int) -> Iterator[Pair]:
    """`num` programs and what they print; the first ones are the same for every `num`."""
    data.check()
    for number in range(num):
        yield make_pair(data, random.Random(f"{seed} {number}"))


def make_pair(data: ProgramData, draw: random.Random) -> Pair:
    length = data.length if data.fixed else draw.randint(1, data.length)
    if data.task == "copy":
        digits = "".join(draw.choice("0123456789") for _ in range(length))
        return Pair(digits, digits)
    if data.task == "addition":
        first, second = _number(draw, length), _number(draw, length)
        return Pair(f"print({first}+{second}).", f"{first + second}.")
    nesting = data.nesting if data.fixed else draw.randint(1, data.nesting)
    return _Program(draw, length).make(nesting)


class _Program:
    """One program while it is written: its lines, and an expression whose value is known."""

    def __init__(self, draw: random.Random, length: int) -> None:
        self.draw, self.length = draw, length
        self.lines: list[str] = []
        self.names = iter(draw.sample(NAMES, len(NAMES)))

    def make(self, nesting: int) -> Pair:
        text, value = self._constant()
        for _ in range(nesting):
            operation = self.draw.choice((self._add, self._subtract, self._times,
                                          self._choose, self._loop, self._name))  # fmt: skip
            text, value = operation(text, value)
        return Pair(";".join([*self.lines, f"print({text})."]), f"{value}.")

    def _constant(self) -> tuple[str, int]:
        value = _number(self.draw, self.length)
        return str(value), value

    def _add(self, text: str, value: int) -> tuple[str, int]:
        other, amount = self._constant()
        return f"({text}+{other})", value + amount

    def _subtract(self, text: str, value: int) -> tuple[str, int]:
        other, amount = self._constant()
        return f"({text}-{other})", value - amount

    def _times(self, text: str, value: int) -> tuple[str, int]:
        factor = self.draw.randint(2, MAX_FACTOR)
        return f"({text}*{factor})", value * factor

    def _choose(self, text: str, value: int) -> tuple[str, int]:
        (left, a), (right, b), (other, c) = (self._constant() for _ in range(3))
        return f"({text} if {left}>{right} else {other})", value if a > b else c

    def _name(self, text: str, value: int) -> tuple[str, int]:
        name = next(self.names)
        self.lines.append(f"{name}={text}")
        return name, value

    def _loop(self, text: str, value: int) -> tuple[str, int]:
        name, _ = self._name(text, value)
        rounds = self.draw.randint(1, MAX_ROUNDS)
        constant, amount = self._constant()
        self.lines.append(f"for x in range({rounds}):{name}+={constant}")
        return name, value + rounds * amount


def _number(draw: random.Random, length: int) -> int:
    return draw.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)
