"""Quality against cost of finished runs, measured under one protocol.

The public function `deepenough.compare` has the name of this package, which is therefore callable:
`import deepenough as de; de.compare(["runs/a", "runs/b"])` works whichever of the two is found.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        from deepenough.compare.frontier import compare

        return compare(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
