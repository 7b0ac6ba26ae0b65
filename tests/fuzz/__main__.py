"""`python -m tests.fuzz`: give bad input of eleven kinds to the product, and count the outcomes.

One case is a function of seed, kind and number: `--kind config --case 17` runs that one again and
shows it. `--engine hypothesis` shrinks what it finds; `--engine atheris` is guided by coverage,
where atheris is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Read by libraries when they are first imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from deepenough.errors import UserError
from tests.fuzz.kinds import KINDS, Kind, World

LIMIT = 60.0
"""Seconds after which a case hangs; most take milliseconds, but a busy machine may stand still."""


class Hang(BaseException):
    """A case has taken too long."""


@dataclass
class Outcomes:
    """What became of the cases of one kind."""

    cases: int = 0
    refused: int = 0
    """Cases that ended with a sentence; the others gave a result."""
    bad: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the block when it takes longer than so many seconds."""

    def stop(*_: Any) -> None:
        raise Hang(f"longer than {seconds:g} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def refused(kind: Kind, case: Any, world: World) -> bool:
    """Give a case to the product and return whether it was refused; a defect is raised."""
    try:
        with time_limit(LIMIT):
            kind.check(case, world)
        return False
    except UserError as error:
        said = str(error)
        assert said.strip() and len(said) < 3000, f"a sentence of {len(said)} characters"
        return True


def draw(kind: Kind, seed: int, number: int, world: World) -> Any:
    """Return a case by its number."""
    return kind.make(random.Random(f"{seed}/{kind.name}/{number}"), world)


def run_kind(
    kind: Kind, cases: int, seed: int = 0, world: World | None = None, show: int = 1
) -> Outcomes:
    """Run so many cases of a kind; show the first defects of each sort."""
    world, found = world or World(), Outcomes()
    begun = time.perf_counter()
    for number in range(cases):
        case = draw(kind, seed, number, world)
        found.cases += 1
        try:
            found.refused += refused(kind, case, world)
        except (Exception, Hang) as error:
            where = traceback.extract_tb(error.__traceback__)
            own = [f for f in where if "/deepenough/" in f.filename] or list(where)
            file, line = own[-1].filename.rpartition("/src/")[2], own[-1].lineno
            what = f"{type(error).__name__} at {file}:{line}"
            found.bad[what] += 1
            if found.bad[what] <= show:
                print(
                    f"{kind.name} --case {number}: {what}: {error!s:.150}\n    {case!r:.300}",
                    flush=True,
                )
    found.seconds = time.perf_counter() - begun
    return found


def run_hypothesis(kind: Kind, cases: int, world: World) -> None:
    """Run so many cases that hypothesis draws; it shrinks the first defect and raises it."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    @settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def check(rng: random.Random) -> None:
        refused(kind, kind.make(rng, world), world)

    check()


class BytesRandom(random.Random):
    """Choices that a fuzzer's bytes make."""

    def __init__(self, content: bytes) -> None:
        super().__init__(0)
        self.content, self.place = content, 0

    def _take(self, number: int) -> int:
        part = self.content[self.place : self.place + number]
        self.place += number
        return int.from_bytes(part, "little")

    def random(self) -> float:
        return self._take(2) / 65536

    def getrandbits(self, k: int) -> int:
        return self._take((k + 7) // 8) % (1 << k)


def run_atheris(kind: Kind, cases: int, world: World) -> None:
    """Run so many cases that atheris finds by coverage; it ends the process at a defect."""
    import atheris

    with contextlib.suppress(UserError):
        kind.check(draw(kind, 0, 0, world), world)  # loads what is to be watched
    for name, module in list(sys.modules.items()):
        if name.startswith("deepenough"):
            for part in list(vars(module).values()):
                if isinstance(part, types.FunctionType) and part.__module__ == name:
                    atheris.instrument_func(part)

    def check(content: bytes) -> None:
        refused(kind, kind.make(BytesRandom(content), world), world)

    atheris.Setup([sys.argv[0], f"-runs={cases}", "-max_len=512", "-len_control=0"], check)
    atheris.Fuzz()


def run(
    scale: float = 1.0, seed: int = 0, only: Sequence[str] = (), cases: int | None = None
) -> dict[str, Outcomes]:
    """Run every kind, or some, with so many cases, or its own number of them times `scale`."""
    world = World()
    results = {}
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        for kind in KINDS.values():
            if not only or kind.name in only:
                number = int(kind.cases * scale) if cases is None else cases
                results[kind.name] = found = run_kind(kind, number, seed, world)
                print(
                    f"{kind.name:10} {found.cases:8,} cases, {found.refused:8,} refused, "
                    f"{found.bad.total():6,} bad, {found.seconds:8.1f} s",
                    flush=True,
                )
    finally:
        world.close()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 1 if there was a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", default=[])
    parser.add_argument("--cases", type=int, help="of each kind, instead of its own number")
    parser.add_argument("--case", type=int, help="run this one alone, and show it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of cases")
    parser.add_argument("--engine", choices=("random", "hypothesis", "atheris"), default="random")
    given = parser.parse_args(argv)
    chosen = [KINDS[name] for name in given.kind or KINDS]
    if given.case is not None:
        world = World()
        case = draw(chosen[0], given.seed, given.case, world)
        print(f"{case!r:.3000}")
        print("refused" if refused(chosen[0], case, world) else "a result")
        return 0
    if given.engine != "random":
        world, engine = World(), run_hypothesis if given.engine == "hypothesis" else run_atheris
        for kind in chosen:
            engine(kind, given.cases or int(kind.cases * given.scale), world)
            print(f"{kind.name}: no defect", flush=True)
        return 0
    results = run(given.scale, given.seed, given.kind, given.cases)
    total = sum(found.cases for found in results.values())
    bad = sum(found.bad.total() for found in results.values())
    print(f"{total:,} cases, {bad:,} bad")
    for name, found in results.items():
        for what, number in found.bad.most_common():
            print(f"    {name}: {what}: {number}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
