"""Run `python -m benchmarks`."""

import os
import sys

# Threads that spin at barriers slow each other down beside other processes. OpenMP reads this when
# torch is loaded, so it has to be set first; what the user has set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from benchmarks.runner import main

sys.exit(main())
