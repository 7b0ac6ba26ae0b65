"""Any encoder that ponders: its own layers one after the other, as many as an example needs.

Each pass is another layer with representations of its own, so each has a classifier and a halting
head of its own (but for the baseline of the last pass alone, which trains a single classifier).
Where an architecture keeps its layers is the business of `models/hf.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel, PreTrainedModel

from deepenough.ponder.checkpoints import LABELS, changed, read_config, take_changes
from deepenough.ponder.config import OPTIONS, PonderEncoderConfig, check_encoder
from deepenough.ponder.heads import Classifier
from deepenough.ponder.model import PonderClassifier

OF_THE_CLASSIFIER = (*OPTIONS, *LABELS, "classifier_dropout")


class PonderEncoderForSequenceClassification(PonderClassifier):
    config_class = PonderEncoderConfig
    config: PonderEncoderConfig
    base_model_prefix = "trunk"

    def __init__(self, config: PonderEncoderConfig) -> None:
        super().__init__(config)
        self.trunk = _without_pooler(AutoModel.from_config(config.encoder))
        num_heads = 1 if config.objective == "last" else self.num_passes
        self.classifiers = nn.ModuleList(
            Classifier(config.hidden_size, self.num_labels, config.classifier_dropout)
            for _ in range(num_heads)
        )
        self._add_halting(self.num_passes - 1)
        self.post_init()

    @property
    def encoder_model(self) -> PreTrainedModel:
        return self.trunk

    def _classifier(self, index: int) -> nn.Module:
        return self.classifiers[min(index, len(self.classifiers) - 1)]

    @classmethod
    def from_encoder(cls, encoder: PreTrainedModel, **options: Any) -> Any:
        """A new classifier over an encoder that is already loaded, which becomes part of it.

        `options` are those of `PonderEncoderConfig`. The encoder's weights are trained with the
        rest, and a pooler of its own is dropped.
        """
        base: Any = encoder.base_model
        check_encoder(base.config)
        options = {"attn_implementation": base.config._attn_implementation, **options}
        model: Any = cls(PonderEncoderConfig(encoder=base.config, **options))
        model.trunk = _without_pooler(base).requires_grad_(True)
        return model.to(device=base.device, dtype=base.dtype)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A pondering model, or any encoder, by name or folder; arguments of the config change it.

        Of an encoder, the labels' names are kept if it was a classifier.
        """
        config = read_config(name, kwargs)
        changes = take_changes(config, kwargs)
        if isinstance(config, PonderEncoderConfig):
            kwargs["config"] = PonderEncoderConfig(**changed(config, changes))
            return super().from_pretrained(name, *args, **kwargs)
        check_encoder(config)
        own = {key: config.to_dict().get(key) for key in LABELS}
        own |= {key: changes.pop(key) for key in OF_THE_CLASSIFIER if key in changes}
        own |= {key: kwargs.pop(key) for key in OF_THE_CLASSIFIER if key in kwargs}
        encoder_config = type(config)(**changed(config, changes))
        encoder = AutoModel.from_pretrained(name, *args, config=encoder_config, **kwargs)
        known = {key: value for key, value in own.items() if value is not None}
        return cls.from_encoder(encoder, **known).eval()


def _without_pooler(encoder: Any) -> Any:
    """A pooler is never reached here; weights that nothing uses stop distributed training."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder
