"""Where measurements go: `metrics.jsonl`, TensorBoard and the log, from the first process alone."""

import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

from deepenough.artifacts import disk_reason
from deepenough.errors import UserError
from deepenough.runs import Metrics, Record, RunFolder

log = logging.getLogger("deepenough")

SECONDS_BETWEEN_LINES = 5.0
LONGEST_SILENCE = 30.0
"""Lines come less often as the work goes on, down to one in so many seconds."""


def announce(text: str) -> None:
    """Say on standard error, from the first process alone, what a command does or has chosen."""
    if os.environ.get("RANK", "0") == "0":
        log.info(text)
        sys.stderr.write(f"{text}\n")


def announce_split(split: str, size: str, data: str) -> None:
    """Say that a split was cut from training text, because the data has none of that name."""
    announce(f"The {split} split is {size} held out of {data}, evenly and the same in every run.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence what a full disk or a missing permission means for a run."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or (reason := disk_reason(error)) is None:
            raise
        raise UserError(
            f"{path} cannot be written ({reason}); the last checkpoint is intact: make room and go "
            "on with --resume."
        ) from error


class Recorder:
    """Write measurements to `metrics.jsonl`, TensorBoard and the log; nothing where disabled."""

    def __init__(self, run: RunFolder, enabled: bool) -> None:
        self.run, self.enabled = run, enabled
        self._metrics: Metrics | None = None
        self._events: BinaryIO | None = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Forget what an earlier run recorded after `step`, everything if that is 0."""
        self._first = step + 1
        if self.enabled:
            with writing(self.run.path):
                self._metrics = Metrics(self.run.metrics)
                self._metrics.truncate_after(step or -1)

    def record(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write one record everywhere."""
        if self._metrics is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # 10 MB, for training alone

        self._metrics.append(Record(step, kind, values))
        numbers = {name: v for name, v in values.items() if isinstance(v, float | int)}
        scalars = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in numbers.items()
        ]
        with writing(self.run.path):
            self._add_event(step=step, summary=Summary(value=scalars))
        shown = " ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        log.info("step %d %s: %s", step, kind, shown)

    def close(self) -> None:
        """Close the event file."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _add_event(self, **fields: Any) -> None:
        """Write an event at once: `SummaryWriter`'s thread would end in a traceback."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._events is None:
            self.run.events.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self._events = (self.run.events / name).open("wb", buffering=0)
            self._add_event(file_version="brain.Event:2")
            # What older files say of this step and later ones is hidden.
            start = SessionLog(status=SessionLog.START)
            self._add_event(step=self._first, session_log=start)
        event = Event(wall_time=time.time(), **fields)
        RecordWriter(self._events).write(event.SerializeToString())


@dataclass
class Meter:
    """Mean loss and rate since the last record; part of a checkpoint, as records may span one."""

    loss: float = 0.0
    steps: int = 0
    units: int = 0
    seconds: float = 0.0

    def add(self, loss: float, units: int, seconds: float) -> None:
        """Count one step."""
        self.loss += loss
        self.steps += 1
        self.units += units
        self.seconds += seconds

    def take(self) -> dict[str, float]:
        """Return the values for a record; counting begins anew."""
        loss, rate = self.loss / self.steps, self.units / max(self.seconds, 1e-9)
        vars(self).update(vars(Meter()))
        return {"loss": loss, "perplexity": perplexity(loss), "tokens_per_second": rate}


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, infinite where it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: a full disk ends a run with a sentence about its records."""


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send deepenough's messages to a file, behind what is there."""
    with writing(path):
        file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file]
    if not logging.getLogger().handlers:  # else an application shows messages in its own way
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    level = log.level
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        for handler in handlers:
            log.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' progress bars away from ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def reading(
    unit: str,
    title: str = "reading",
    start: int = 0,
    enabled: bool = True,
    console: Console | None = None,
) -> Iterator[Callable[..., None]]:
    """Show the progress of long work: a bar on a terminal, elsewhere a line now and then.

    Yields a function to call with how much is done (`start` of it before), of how much if that is
    known, and what to show beside the time left; by default that is the rate in `unit`.
    """
    console = console or Console(stderr=True)
    began = last_line = time.perf_counter()
    first: tuple[float, int] | None = None
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    on_terminal = enabled and console.is_terminal
    with Progress(TextColumn(title), *columns, console=console, disable=not on_terminal) as bar:
        task = bar.add_task(title, total=None, shown="")

        def show(done: int, total: int | None, shown: str = "") -> None:
            nonlocal last_line, first
            now = time.perf_counter()
            # The first piece of work takes longer than those that follow: no time left is told
            # by it, and it is not counted when there are others.
            since, before = first or (began, start)
            rate = (done - before) / max(now - since, 1e-9)
            shown = shown or _rate(rate, unit)
            if total is not None and rate and first:
                shown += f", {_duration((total - done) / rate)} left"
            first = first or (now, done)
            bar.update(task, completed=done, total=total, shown=shown)
            pause = min(LONGEST_SILENCE, max(SECONDS_BETWEEN_LINES, (now - began) / 10))
            if enabled and not on_terminal and now - last_line >= pause:
                last_line = now
                of_all = "" if total is None else f"/{total}"
                sys.stderr.write(f"{done}{of_all} {unit}: {shown}\n")

        yield show


def _rate(rate: float, unit: str) -> str:
    """Return a rate that is never shown as 0: slow work is told in seconds for one."""
    if rate <= 0:
        return ""
    return f"{rate:,.3g} {unit}/s" if rate >= 1 else f"{1 / rate:,.3g} s for one of the {unit}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{hours:.1f} h"
