"""Ponder: classifiers that think as long as the input needs (PonderNet, arXiv 2107.05407)."""

from transformers import AutoConfig, AutoModelForSequenceClassification

from deepenough.adaptive.ponder.albert import PonderAlbertForSequenceClassification
from deepenough.adaptive.ponder.config import PonderAlbertConfig, PonderEncoderConfig
from deepenough.adaptive.ponder.encoder import PonderEncoderForSequenceClassification
from deepenough.adaptive.ponder.output import PonderOutput

for _config, _model in (
    (PonderAlbertConfig, PonderAlbertForSequenceClassification),
    (PonderEncoderConfig, PonderEncoderForSequenceClassification),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForSequenceClassification.register(_config, _model)

__all__ = [
    "PonderAlbertConfig",
    "PonderAlbertForSequenceClassification",
    "PonderEncoderConfig",
    "PonderEncoderForSequenceClassification",
    "PonderOutput",
]
