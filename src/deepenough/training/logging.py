"""Where measurements go: `metrics.jsonl`, TensorBoard and the log, from the first process alone."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers.utils import logging as transformers_logging

from deepenough.errors import UserError
from deepenough.runs import Metrics, Record, RunFolder

log = logging.getLogger("deepenough")


class Recorder:
    """Write measurements to `metrics.jsonl`, TensorBoard and the log; nothing where disabled."""

    def __init__(self, run: RunFolder, enabled: bool) -> None:
        self.run, self.enabled = run, enabled
        self._metrics: Metrics | None = None
        self._events: EventFile | None = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Forget what an earlier run recorded after `step`, everything if that is 0."""
        self._first = step + 1
        if self.enabled:
            try:
                self._metrics = Metrics(self.run.metrics)
                self._metrics.truncate_after(step or -1)
            except OSError as error:
                raise _unwritable(self.run, error) from error

    def record(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write one record everywhere."""
        if self._metrics is None:
            return
        self._metrics.append(Record(step, kind, values))
        try:
            if self._events is None:
                self._events = EventFile(self.run.events, self._first)
            self._events.add({f"{kind}/{name}": v for name, v in _scalars(values)}, step)
        except OSError as error:
            raise _unwritable(self.run, error) from error
        shown = " ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float | int))
        log.info("step %d %s: %s", step, kind, shown)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def _unwritable(run: RunFolder, error: OSError) -> UserError:
    return UserError(
        f"{run.path} cannot be written to ({error.strerror or error}); the last checkpoint is "
        "intact: make room and go on with --resume."
    )


def _scalars(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, float | int):
            yield name, float(value)
        elif name == "pi":
            for block, row in enumerate(value, start=1):
                for branch, share in zip(("attention", "dense", "identity"), row, strict=True):
                    yield f"pi/block{block}-{branch}", float(share)


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
        loss = self.loss / self.steps
        values = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "tokens_per_second": self.units / max(self.seconds, 1e-9),
        }
        self.load(asdict(Meter()))
        return values

    def load(self, state: dict[str, Any]) -> None:
        """Take up the counts of a checkpoint."""
        self.loss, self.steps = state["loss"], state["steps"]
        self.units, self.seconds = state["units"], state["seconds"]


class EventFile:
    """A TensorBoard event file, each event written at once.

    What older files of the folder say of `first_step` and later is hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the scalars of one step."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: a full disk ends a run with a sentence about its records."""


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send deepenough's messages to a file, behind what is there."""
    logger = logging.getLogger("deepenough")
    try:
        file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file]
    if not logging.getLogger().handlers:  # else an application shows messages in its own way
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
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
