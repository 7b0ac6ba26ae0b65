"""Run `python -m benchmarks`."""

import sys

from deepenough.__main__ import ask_for_a_short_spin

ask_for_a_short_spin()  # before torch is loaded

from benchmarks.runner import main  # noqa: E402

sys.exit(main())
