"""`training.log`: what a run says, with times, beside what it shows on the terminal."""

from __future__ import annotations

import logging
from pathlib import Path


def log_to(path: Path) -> None:
    """Send deepenough's messages to a file; an earlier run's file is let go."""
    logger = logging.getLogger("deepenough")
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
