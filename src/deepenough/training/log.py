"""`training.log`: what a run says, with times; its warnings are shown on the terminal as well."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging as transformers_logging

from deepenough.errors import UserError


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk ends a run in a sentence about its records, not in traces from here."""


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
