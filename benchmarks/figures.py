"""Figures with their spread, and functions timed in turns.

A benchmark returns a nested dictionary. Its numbers become figures named by their path, for example
`loop.times_generate`; its entry `settings` says how they were measured.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Unit of a figure that names none, by a word in its name. The first that matches is taken.
UNITS = {
    "tokens_per_second": "tokens/s",
    "steps_per_second": "steps/s",
    "seconds": "s",
    "milliseconds": "ms",
    "minutes": "min",
    "mb": "MB",
    "gflops": "GFLOP/s",
    "gflop": "GFLOP",
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
    "bleu": "BLEU",
    "kl": "nats",
    "loss": "nats",
    "losses": "nats",
    "accuracy": "share",
    "agreement": "share",
    "disagreement": "share",
    "exact": "share",
    "share": "share",
    "layers": "layers",
    "passes": "passes",
}


class Unavailable(Exception):
    """Raised by a benchmark that cannot run here, for lack of data or of a trained model."""


def require(path: str | Path, remedy: str) -> Path:
    """Return a path that a benchmark reads, or raise `Unavailable` with what to do about it."""
    if not Path(path).exists():
        raise Unavailable(f"{path} is missing: {remedy}")
    return Path(path)


@dataclass(frozen=True)
class Figure:
    """A measured value with its unit and, where it was measured several times, its spread."""

    value: float
    unit: str | None = None
    low: float | None = None
    high: float | None = None


def figures_of(values: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the numbers of a nested dictionary as figures, named by their path.

    Args:
        values: Numbers, `Figure`s, and dictionaries or lists of them. Text and truth values are
            settings, not figures, and are refused.
    """
    return dict(_flatten("", values))


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flatten(f"{path}.{index}", inner)
    elif isinstance(value, Figure):
        yield (
            path,
            value if value.unit else Figure(value.value, unit_of(path), value.low, value.high),
        )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, Figure(value, unit_of(path))
    elif value is not None:
        raise TypeError(f"{path} is {value!r}, not a number: move it into `settings`.")


def unit_of(name: str) -> str | None:
    """Return the unit that a figure's name implies, or None; below seconds, all are seconds."""
    if any(re.search(r"(^|_)seconds($|_)", part) for part in name.split(".")[:-1]):
        return "s"
    for part in reversed(name.split(".")):
        for word, unit in UNITS.items():
            if re.search(rf"(^|_){word}($|_)", part):
                return unit
    return None


def spread(values: Sequence[float], unit: str | None = None) -> Figure:
    """Return the median of repeated measurements with their lowest and highest."""
    return Figure(statistics.median(values), unit, min(values), max(values))


@dataclass
class Timings:
    """Seconds of several functions that took turns, one number per function and round."""

    seconds: dict[str, list[float]]
    results: dict[str, list[Any]] = field(default_factory=dict)
    """What each function returned in the last round, one entry per input."""

    def best(self, name: str) -> Figure:
        """Return the seconds of a function's best round, with the spread of all rounds."""
        rounds = self.seconds[name]
        return Figure(min(rounds), "s", min(rounds), max(rounds))

    def ratio(self, numerator: str, denominator: str) -> Figure:
        """Return the ratio of two best times, with the spread of the ratios within rounds."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        rounds = [above / below for above, below in pairs]
        value = min(self.seconds[numerator]) / min(self.seconds[denominator])
        return Figure(value, "x", min(rounds), max(rounds))

    def rate(self, name: str, count: float, unit: str) -> Figure:
        """Return how many of something a function made in a second: best round and spread."""
        rates = [count / seconds for seconds in self.seconds[name]]
        return Figure(max(rates), unit, min(rates), max(rates))


def interleaved(
    functions: Mapping[str, Callable[..., Any]],
    rounds: int,
    inputs: Sequence[Any] | None = None,
    warmup: int = 1,
) -> Timings:
    """Time functions that take turns, so that a busy moment slows all of them.

    Args:
        functions: What to time, by name.
        rounds: How often every function runs (on every input) and is timed.
        inputs: If given, each function is called with each of them in turn; a round is all inputs.
        warmup: Rounds before the clock starts, on the first input only.

    Returns:
        The seconds of every function and round, and what the last round returned.
    """
    calls: list[tuple[Any, ...]] = [()] if inputs is None else [(one,) for one in inputs]
    for _ in range(warmup):
        for function in functions.values():
            function(*calls[0])
    timings = Timings({name: [] for name in functions})
    for number in range(rounds):
        elapsed = dict.fromkeys(functions, 0.0)
        timings.results = {name: [] for name in functions}
        for call in calls:
            for name, function in functions.items():
                started = time.perf_counter()
                result = function(*call)
                elapsed[name] += time.perf_counter() - started
                timings.results[name].append(result)
        for name, seconds in elapsed.items():
            timings.seconds[name].append(seconds)
        shown = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in elapsed.items())
        print(f"round {number + 1} of {rounds}: {shown}", flush=True)
    return timings
