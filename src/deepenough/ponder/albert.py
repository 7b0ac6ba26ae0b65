"""ALBERT that ponders: one layer applied as often as an example needs (arXiv 1909.11942).

Names are those of `AlbertForSequenceClassification`, so that its checkpoints, and those of plain
ALBERT, load as they are; only the halting head is new. Because the layer is shared, a model can
make more passes than it was pretrained with, or fewer.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AlbertModel, PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.hf.layouts import LAYOUTS, register
from deepenough.ponder.checkpoints import changed, read_config, take_changes
from deepenough.ponder.config import PonderAlbertConfig
from deepenough.ponder.model import PonderClassifier

register(PonderAlbertConfig.model_type, LAYOUTS["albert"])


class PonderAlbertForSequenceClassification(PonderClassifier):
    config_class = PonderAlbertConfig
    config: PonderAlbertConfig
    base_model_prefix = "albert"

    def __init__(self, config: PonderAlbertConfig) -> None:
        super().__init__(config)
        self.albert = AlbertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self._add_halting(1)
        self.post_init()

    @property
    def encoder_model(self) -> PreTrainedModel:
        return self.albert

    def _layers(self, adapter: Adapter) -> list[nn.Module]:
        return [adapter.layers[0]] * self.num_passes

    def _classifier(self, index: int) -> nn.Module:
        pooler, tanh = self.albert.pooler, self.albert.pooler_activation
        return nn.Sequential(pooler, tanh, self.dropout, self.classifier)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A pondering ALBERT, or any ALBERT checkpoint, by name or folder; arguments of the config
        change it."""
        config = read_config(name, kwargs)
        if config.model_type not in ("albert", PonderAlbertConfig.model_type):
            raise UserError(
                f"{name} is a checkpoint of {config.model_type!r}, and this class ponders with "
                "ALBERT: give an ALBERT checkpoint, or use PonderEncoderForSequenceClassification."
            )
        changes = take_changes(config, kwargs)
        kwargs["config"] = PonderAlbertConfig(**changed(config, changes))
        return super().from_pretrained(name, *args, **kwargs)
