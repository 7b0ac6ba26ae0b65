"""Ponder: classifiers that think as long as the input needs (PonderNet, arXiv 2107.05407)."""

from transformers import AutoConfig, AutoModelForSequenceClassification

from deepenough.ponder.albert import PonderAlbertForSequenceClassification
from deepenough.ponder.config import PonderAlbertConfig, PonderEncoderConfig
from deepenough.ponder.encoder import PonderEncoderForSequenceClassification
from deepenough.ponder.output import PonderOutput

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
