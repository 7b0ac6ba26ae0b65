"""Progress bars with rate and time left; a line now and then where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 30.0

Reading = Callable[[int, int | None], None]


class Progress:
    """Shows steps done, loss, rate of training and time left."""

    def __init__(
        self,
        total: int,
        start: int,
        unit: str,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        self.total, self.start, self.unit, self.enabled = total, start, unit, enabled
        self.began = self.last_line = time.perf_counter()
        self.units, self.seconds = 0, 0.0
        self.bar: Bar | None = None
        console = console or Console(stderr=True)
        if enabled and console.is_terminal:
            self.bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                console=console,
            )
            self.task = self.bar.add_task("training", total=total, completed=start, shown="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, done: int, units: int, seconds: float, loss: float) -> None:
        """One step is done, of so many units in so many seconds."""
        if not self.enabled:
            return
        self.units += units
        self.seconds += seconds
        now = time.perf_counter()
        # The rate is that of the steps; the time left includes validations as they come.
        rate = self.units / max(self.seconds, 1e-9)
        left = (now - self.began) / (done - self.start) * (self.total - done)
        shown = f"loss {loss:.3f}, {rate:,.0f} {self.unit}/s, {_duration(left)} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, shown=shown)
        elif now - self.last_line >= _SECONDS_BETWEEN_LINES or done == self.total:
            self.last_line = now
            sys.stderr.write(f"step {done}/{self.total}: {shown}\n")


@contextlib.contextmanager
def reading(what: str, console: Console | None = None) -> Iterator[Reading]:
    """For work that reads texts: call it with how many are done, and of how many if known."""
    console = console or Console(stderr=True)
    began = last_line = time.perf_counter()
    columns = (
        TextColumn("reading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None, shown="")

        def show(done: int, total: int | None) -> None:
            nonlocal last_line
            now = time.perf_counter()
            rate = done / max(now - began, 1e-9)
            shown = f"{rate:,.0f} {what}/s"
            if total is not None and done:
                shown += f", {_duration((total - done) / rate)} left"
            bar.update(task, completed=done, total=total, shown=shown)
            if not console.is_terminal and now - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = now
                sys.stderr.write(f"{done}{'' if total is None else f'/{total}'} {what}: {shown}\n")

        yield show


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{hours:.1f} h"
