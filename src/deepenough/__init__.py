"""Transformers that go only as deep as they need.

The public names are those that `__init__.pyi` imports. Each is loaded when it is first used, so
that `import deepenough` (and with it `deepenough --help`) does not wait for torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
