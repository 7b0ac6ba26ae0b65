"""What the two processes of a test do: a training that is killed once, then a benchmark's work.

Torchrun starts them anew after the kill, and they go on with a divided model. The first process is
the one that is killed: it alone writes, and the other one must speak.
"""

import json
import os
import signal
import sys
from typing import Any

from benchmarks.two_processes import work
from deepenough.cli import main
from deepenough.training.trainer import Trainer


def train_and_be_killed(words: list[str]) -> None:
    """Run the command; at the first start, the first process is killed at its seventh step."""
    step, is_first = Trainer._step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def killed(self: Trainer, number: int) -> Any:
        if number == 6 and is_first and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number)

    Trainer._step = killed  # type: ignore[method-assign]
    code = main(words if is_first else [*words, "--parallel=fsdp"])
    Trainer._step = step  # type: ignore[method-assign]
    if code:
        sys.exit(code)


if __name__ == "__main__":
    train_and_be_killed(json.loads(os.environ["KILLED_COMMAND"]))
    work()
