"""Ponder: classifiers that think as long as the input needs (PonderNet, arXiv 2107.05407).

Importing a model class makes its checkpoints known to `AutoModelForSequenceClassification`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepenough.ponder.config import PonderAlbertConfig as PonderAlbertConfig
    from deepenough.ponder.config import PonderEncoderConfig as PonderEncoderConfig
    from deepenough.ponder.inference import PonderOutput as PonderOutput
    from deepenough.ponder.modeling import (
        PonderAlbertForSequenceClassification as PonderAlbertForSequenceClassification,
    )
    from deepenough.ponder.modeling import (
        PonderEncoderForSequenceClassification as PonderEncoderForSequenceClassification,
    )

__all__ = [
    "PonderAlbertConfig",
    "PonderAlbertForSequenceClassification",
    "PonderEncoderConfig",
    "PonderEncoderForSequenceClassification",
    "PonderOutput",
]


def __getattr__(name: str) -> Any:
    """Load the models on first use: the commands of this package must start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepenough.ponder import modeling

    return getattr(modeling, name)
