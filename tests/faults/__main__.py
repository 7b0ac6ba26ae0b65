"""Run `python -m tests.faults HARNESS`: kills, corruption."""

import importlib
import sys

HARNESSES = ("kills", "corruption")

if len(sys.argv) < 2 or sys.argv[1] not in HARNESSES:
    sys.exit(f"usage: python -m tests.faults {{{','.join(HARNESSES)}}} [options]")
sys.exit(importlib.import_module(f"tests.faults.{sys.argv[1]}").main(sys.argv[2:]))
