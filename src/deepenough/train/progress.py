"""A progress bar with rate and time left; a line now and then where there is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    def __init__(self, total: int, start: int, unit: str, enabled: bool = True) -> None:
        self.total, self.start, self.unit = total, start, unit
        self.began = self.last_line = time.perf_counter()
        self.units = 0
        self.console = Console(stderr=True)
        self.bar: Bar | None = None
        self.enabled = enabled
        if enabled and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("training", total=total, completed=start, rate="")

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

    def advance(self, done: int, units: int, loss: float) -> None:
        if not self.enabled:
            return
        self.units += units
        now = time.perf_counter()
        elapsed = max(1e-9, now - self.began)
        rate = f"loss {loss:.3f}, {self.units / elapsed:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, rate=rate)
        elif now - self.last_line >= _SECONDS_BETWEEN_LINES or done == self.total:
            self.last_line = now
            left = elapsed / max(1, done - self.start) * (self.total - done)
            sys.stderr.write(f"step {done}/{self.total}: {rate}, {left / 60:.1f} min left\n")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is not training: it does not count in the rate."""
        before = time.perf_counter()
        yield
        self.began += time.perf_counter() - before
