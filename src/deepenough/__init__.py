"""Transformers that go only as deep as they need.

The names below are the public API. They are loaded when first used, so that `import deepenough`
(and with it `deepenough --help`) does not wait for torch. To add a name, write it twice: in the
imports for type checkers and in the table of modules; a test keeps the two equal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepenough.hf import OWN_CLASSES

if TYPE_CHECKING:
    from deepenough.cli import train as train
    from deepenough.compare.frontier import compare as compare
    from deepenough.decoding.api import early_exit as early_exit
    from deepenough.decoding.api import speculate as speculate
    from deepenough.decoding.calibration import Calibration as Calibration
    from deepenough.decoding.calibration import calibrate as calibrate
    from deepenough.decoding.draft_model import DraftModel as DraftModel
    from deepenough.decoding.drafters import Drafter as Drafter
    from deepenough.decoding.drafters import FallbackDrafter as FallbackDrafter
    from deepenough.decoding.drafters import LinearDrafter as LinearDrafter
    from deepenough.decoding.drafters import LookupDrafter as LookupDrafter
    from deepenough.decoding.drafters import ShortcutDrafter as ShortcutDrafter
    from deepenough.decoding.early_exit import ConfidenceGap as ConfidenceGap
    from deepenough.decoding.early_exit import ExitPolicy as ExitPolicy
    from deepenough.decoding.early_exit import FixedLayer as FixedLayer
    from deepenough.decoding.early_exit import LowEntropy as LowEntropy
    from deepenough.decoding.early_exit import TopProbability as TopProbability
    from deepenough.errors import UserError as UserError
    from deepenough.hf.loading import load as load
    from deepenough.lazy.modeling import LazyTransformerConfig as LazyTransformerConfig
    from deepenough.lazy.modeling import LazyTransformerForCausalLM as LazyTransformerForCausalLM
    from deepenough.lazy.modeling import (
        LazyTransformerForConditionalGeneration as LazyTransformerForConditionalGeneration,
    )
    from deepenough.lazy.transition import LazyTransition as LazyTransition
    from deepenough.par.modeling import ParConfig as ParConfig
    from deepenough.par.modeling import ParForCausalLM as ParForCausalLM
    from deepenough.ponder.config import PonderAlbertConfig as PonderAlbertConfig
    from deepenough.ponder.config import PonderEncoderConfig as PonderEncoderConfig
    from deepenough.ponder.modeling import (
        PonderAlbertForSequenceClassification as PonderAlbertForSequenceClassification,
    )
    from deepenough.ponder.modeling import (
        PonderEncoderForSequenceClassification as PonderEncoderForSequenceClassification,
    )
    from deepenough.runs import Record as Record
    from deepenough.runs import RunFolder as RunFolder
    from deepenough.shortcut.modeling import Shortcuts as Shortcuts
    from deepenough.trace import DepthTrace as DepthTrace

__version__ = "0.1.0"

_NAMES = {
    "deepenough.cli": ["train"],
    "deepenough.compare.frontier": ["compare"],
    "deepenough.decoding.api": ["early_exit", "speculate"],
    "deepenough.decoding.calibration": ["Calibration", "calibrate"],
    "deepenough.decoding.draft_model": ["DraftModel"],
    "deepenough.decoding.drafters": [
        *("Drafter", "FallbackDrafter", "LinearDrafter", "LookupDrafter", "ShortcutDrafter"),
    ],
    "deepenough.decoding.early_exit": [
        *("ConfidenceGap", "ExitPolicy", "FixedLayer", "LowEntropy", "TopProbability"),
    ],
    "deepenough.errors": ["UserError"],
    "deepenough.hf.loading": ["load"],
    "deepenough.lazy.modeling": [
        *("LazyTransformerConfig", "LazyTransformerForCausalLM"),
        "LazyTransformerForConditionalGeneration",
    ],
    "deepenough.lazy.transition": ["LazyTransition"],
    "deepenough.par.modeling": ["ParConfig", "ParForCausalLM"],
    "deepenough.ponder.config": ["PonderAlbertConfig", "PonderEncoderConfig"],
    "deepenough.ponder.modeling": [
        *("PonderAlbertForSequenceClassification", "PonderEncoderForSequenceClassification"),
    ],
    "deepenough.runs": ["Record", "RunFolder"],
    "deepenough.shortcut.modeling": ["Shortcuts"],
    "deepenough.trace": ["DepthTrace"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)

# A saved model names its class: so a model of our own loads whether or not it was imported before.
OWN_CLASSES.update({name: place for name, place in _MODULES.items() if "For" in name})


def __getattr__(name: str) -> Any:
    """Load a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    """Return every public name, loaded or not."""
    return sorted({*globals(), *__all__})
