"""Run `python -m tests.faults [HARNESS [options]]`: all of them, or one alone."""

import importlib
import importlib.util
import sys

HARNESSES = ("corruption", "hostile", "kills", "mistakes")

names = sys.argv[1:2] or [n for n in HARNESSES if importlib.util.find_spec(f"tests.faults.{n}")]
if not set(names) <= set(HARNESSES):
    sys.exit(f"usage: python -m tests.faults [{{{','.join(HARNESSES)}}} [options]]")
modules = [importlib.import_module(f"tests.faults.{name}") for name in names]
sys.exit(max([module.main(sys.argv[2:]) for module in modules]))
