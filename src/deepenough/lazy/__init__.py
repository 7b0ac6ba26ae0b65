"""Lazy: Universal Transformers that update only what still changes (ACL 2022, long 208).

The names below are loaded when first used, so that the command line need not wait for torch.
Importing one of them registers both models with transformers' `Auto` classes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepenough.lazy.config import LazyTransformerConfig as LazyTransformerConfig
    from deepenough.lazy.modeling import LazyEncoderOutput as LazyEncoderOutput
    from deepenough.lazy.modeling import LazyOutput as LazyOutput
    from deepenough.lazy.modeling import LazyTransformerForCausalLM as LazyTransformerForCausalLM
    from deepenough.lazy.modeling import (
        LazyTransformerForConditionalGeneration as LazyTransformerForConditionalGeneration,
    )
    from deepenough.lazy.transition import LazyTransition as LazyTransition

__all__ = [
    "LazyEncoderOutput",
    "LazyOutput",
    "LazyTransformerConfig",
    "LazyTransformerForCausalLM",
    "LazyTransformerForConditionalGeneration",
    "LazyTransition",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "transition" if name == "LazyTransition" else "modeling"
    return getattr(importlib.import_module(f"deepenough.lazy.{module}"), name)
