"""The entry point `deepenough`: what must be set before torch is loaded, then the command line."""

import os
import sys


def ask_for_a_short_spin() -> None:
    """Ask OpenMP, which reads it when torch is loaded, to spin at barriers for a moment only.

    Threads that spin starve beside a busy neighbour: 55 operations a second where a short spin
    makes 271. On a quiet machine the short spin costs nothing. What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    ask_for_a_short_spin()
    from deepenough.cli import main as run_command_line

    code = run_command_line(argv)
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        # Its threads would be torn down with the process, which now and then ends in an abort.
        distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
