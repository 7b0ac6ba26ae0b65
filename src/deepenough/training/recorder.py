"""Where measurements go: `metrics.jsonl`, TensorBoard and the log, from the first process alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from deepenough.errors import UserError
from deepenough.runs import Metrics, Record, RunFolder
from deepenough.training.events import EventFile

log = logging.getLogger("deepenough")


class Recorder:
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
        self.loss += loss
        self.steps += 1
        self.units += units
        self.seconds += seconds

    def take(self) -> dict[str, float]:
        """The values for a record; counting begins anew."""
        loss = self.loss / self.steps
        values = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "tokens_per_second": self.units / max(self.seconds, 1e-9),
        }
        self.load(asdict(Meter()))
        return values

    def load(self, state: dict[str, Any]) -> None:
        self.loss, self.steps = state["loss"], state["steps"]
        self.units, self.seconds = state["units"], state["seconds"]
