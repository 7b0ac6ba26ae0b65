"""Learning to Execute (arXiv 1410.4615): short programs and what they print, as pairs of text.

Three kinds, of chosen difficulty, from a seed:

- `addition`: `print(48213+905).`, numbers of up to `length` digits.
- `copy`: up to `length` digits, to be said again.
- `program`: assignments, sums, products with a small number, conditions and loops, put into one
  another up to `nesting` deep; the numbers in them have up to `length` digits.

As in the paper, a program has one line a statement and ends in `print(...)`; here lines are joined
by `;`, so that a program is one line of a file, and a loop of `k` rounds is written out as
`for x in range(k):v+=c`, whose effect a few additions give. What a program prints is found by
running the same operations, never by `eval`. Difficulty mixes as in the paper's best curriculum:
length and nesting of each sample are drawn up to the limits, not fixed at them.

What is held out is held out for good: the text of a program alone decides its split, so that no
program of the valid or test split is ever met in training, however many are drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from deepenough.data.translation import Pair
from deepenough.errors import UserError

MAX_ROUNDS = 9
MAX_FACTOR = 9
NAMES = "abcdefghijklmnopqrstuvwyz"
"""Of variables; x counts the rounds of loops."""


HELD_OUT = ("valid", "test")
HELD_OUT_EVERY = 20
"""Of so many programs one is of the valid split and one of the test split."""
MAX_DRAWS = 100
"""Draws for each held-out program that is asked for, before it is said that there are none."""

Kind = Literal["addition", "copy", "program"]


class Program(NamedTuple):
    """A program, what it prints, and how hard it is."""

    source: str
    target: str
    kind: str
    length: int
    """Digits of its numbers."""
    nesting: int
    """Operations put into one another."""

    @property
    def pair(self) -> Pair:
        return Pair(self.source, self.target)


@dataclass
class ProgramData:
    """Programs to execute"""

    kinds: list[Kind] = field(default_factory=lambda: ["addition"])
    """What is drawn from, evenly: addition of two numbers, copy of one, and program, with control
    flow."""

    length: int = 3
    """Digits of a number at most."""

    nesting: int = 2
    """Operations that a program puts into one another at most."""

    fixed: bool = False
    """Let all samples have the full length and nesting instead of drawing them up to it."""

    reverse: bool = False
    """Write answers last digit first: a carry is then known before the digit that needs it."""

    batch_size: int = 64
    """Programs in one batch, over all processes."""

    eval_size: int = 1000
    """Held-out programs that are measured, fewer where there are not so many."""

    def check(self) -> None:
        for name in ("length", "nesting", "batch_size", "eval_size"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name} must be at least 1: got {getattr(self, name)}.")
        if not self.kinds:
            raise UserError("data.kinds is empty: name addition, copy or program.")
        if self.nesting > len(NAMES):
            raise UserError(
                f"data.nesting is {self.nesting}, but a program has only {len(NAMES)} names for "
                "variables: ask for less."
            )

    @property
    def max_length(self) -> int:
        """Characters that no program and no answer is longer than."""
        return 32 + self.nesting * (32 + 4 * self.length) + 2 * self.length


def make_programs(data: ProgramData, num: int, seed: int | str) -> Iterator[Program]:
    """`num` programs to train on; the first ones are the same for every `num`."""
    data.check()
    for number in range(num):
        draw = random.Random(f"{seed} {number}")
        program = make_program(data, draw)
        for _ in range(MAX_DRAWS):
            if split_of(program) == "train":
                break
            program = make_program(data, draw)
        else:
            raise _too_few(data, "train")
        yield program


def held_out(data: ProgramData, split: str, seed: int | str) -> list[Program]:
    """`eval_size` different programs of a split that is not trained on, or all that are found."""
    data.check()
    if split not in HELD_OUT:
        raise UserError(f"Programs are held out for {' and '.join(HELD_OUT)}: got {split!r}.")
    draw = random.Random(f"{seed} {split}")
    found: dict[str, Program] = {}
    for _ in range(MAX_DRAWS * (data.eval_size + HELD_OUT_EVERY)):
        program = make_program(data, draw)
        if split_of(program) == split:
            found[program.source] = program
            if len(found) == data.eval_size:
                break
    if not found:
        raise _too_few(data, split)
    return list(found.values())


def split_of(program: Program) -> str:
    """By a hash of the text: the same for everyone, whatever the seed."""
    digest = hashlib.blake2b(program.source.encode(), digest_size=4).digest()
    place = int.from_bytes(digest, "little") % HELD_OUT_EVERY
    return HELD_OUT[place] if place < len(HELD_OUT) else "train"


def _too_few(data: ProgramData, split: str) -> UserError:
    return UserError(
        f"Among {' and '.join(data.kinds)} of length {data.length} there is nothing for the "
        f"{split} split: raise data.length."
    )


def make_program(data: ProgramData, draw: random.Random) -> Program:
    kind = draw.choice(data.kinds)
    length = data.length if data.fixed else draw.randint(1, data.length)
    nesting = 1
    if kind == "copy":
        digits = "".join(draw.choice("0123456789") for _ in range(length))
        pair = Pair(digits, digits)
    elif kind == "addition":
        first, second = _number(draw, length), _number(draw, length)
        pair = Pair(f"print({first}+{second}).", str(first + second))
    else:
        nesting = data.nesting if data.fixed else draw.randint(1, data.nesting)
        pair = _Program(draw, length).make(nesting)
    answer = pair.target[::-1] if data.reverse else pair.target
    return Program(pair.source, f"{answer}.", kind, length, nesting)


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
        return Pair(";".join([*self.lines, f"print({text})."]), str(value))

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
