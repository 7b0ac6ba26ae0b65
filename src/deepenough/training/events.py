"""TensorBoard event files, written at once.

Not torch's `SummaryWriter`, which writes from a thread of its own: there a kill costs the last two
minutes, and a full disk ends in a traceback that nobody can catch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    def __init__(self, folder: Path, first_step: int) -> None:
        """A new file in the folder; what older ones say of `first_step` and later is hidden."""
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
