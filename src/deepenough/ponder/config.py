"""Hugging Face configs of pondering classifiers: an encoder's config and `PonderSettings`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import AlbertConfig, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from deepenough.errors import UserError
from deepenough.ponder.settings import PonderSettings, check_settings

OPTIONS = tuple(field.name for field in fields(PonderSettings))
NOT_INPUTS = ["passes", "halting", "step_logits", "halt_probabilities", "terms", "trace"]


class PonderAlbertConfig(AlbertConfig):
    """`AlbertConfig`'s arguments and those of `PonderSettings`.

    `num_hidden_layers` keeps its meaning, the passes of the pretrained model; `num_passes` says how
    many are made here.
    """

    model_type = "ponder_albert"
    keys_to_ignore_at_inference = NOT_INPUTS

    def __init__(self, **kwargs: Any) -> None:
        options = _take_options(kwargs)
        super().__init__(**kwargs)
        for name in ("num_hidden_groups", "inner_group_num"):
            if getattr(self, name) != 1:
                raise UserError(
                    f"This ALBERT has {name} = {getattr(self, name)}, and pondering repeats a "
                    "single layer: use a checkpoint in which all passes share one layer, or "
                    "PonderEncoderForSequenceClassification."
                )
        _set_options(self, options, shared=True)


class PonderEncoderConfig(PreTrainedConfig):
    """The config of any encoder, as `encoder`, and the arguments of `PonderSettings`."""

    model_type = "ponder_encoder"
    keys_to_ignore_at_inference = NOT_INPUTS
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 - the form transformers asks for

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        options = _take_options(kwargs)
        if not isinstance(encoder, PreTrainedConfig):
            values = dict(encoder or {"model_type": "bert"})
            encoder = AutoConfig.for_model(values.pop("model_type"), **values)
        check_encoder(encoder)
        self.encoder = encoder
        self.classifier_dropout = classifier_dropout
        super().__init__(**kwargs)
        if not 0.0 <= classifier_dropout < 1.0:
            raise UserError(f"classifier_dropout must be in [0, 1): got {classifier_dropout}.")
        _set_options(self, options, shared=False)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """What transformers changes when it changes the vocabulary."""
        return self.encoder

    @property
    def hidden_size(self) -> int:
        return int(self.encoder.hidden_size)


def check_encoder(config: PreTrainedConfig) -> None:
    """Refuse what is not an encoder: its first token would see nothing of the text."""
    kind = config.model_type
    if kind in (PonderEncoderConfig.model_type, PonderAlbertConfig.model_type):
        raise UserError(f"A checkpoint of {kind!r} ponders already: load it with its own class.")
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"A model of type {kind!r} has an encoder and a decoder, and pondering classifiers "
            "need an encoder alone, such as BERT, RoBERTa, MPNet or MiniLM."
        )
    reads_both_ways = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if getattr(config, "is_decoder", False) or (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not reads_both_ways
    ):
        raise UserError(
            f"A model of type {kind!r} reads from left to right, and pondering classifiers need "
            "an encoder such as BERT, RoBERTa, MPNet or MiniLM."
        )


def check_config(config: PonderAlbertConfig | PonderEncoderConfig) -> None:
    """Again what is checked when a config is made: transformers may have changed it since."""
    shared = isinstance(config, PonderAlbertConfig)
    check_settings(options_of(config), _depth(config), shared)
    if config.halting_head == "answer" and config.num_labels == 1:
        raise UserError(
            "halting_head 'answer' reads by how much one label leads, and there is only one: "
            "choose previous."
        )


def options_of(config: PonderAlbertConfig | PonderEncoderConfig) -> PonderSettings:
    return PonderSettings(**{name: getattr(config, name) for name in OPTIONS})


def _take_options(kwargs: dict[str, Any]) -> PonderSettings:
    return PonderSettings(**{name: kwargs.pop(name) for name in OPTIONS if name in kwargs})


def _set_options(config: Any, options: PonderSettings, shared: bool) -> None:
    options.num_passes = check_settings(options, _depth(config), shared)
    for name in OPTIONS:
        setattr(config, name, getattr(options, name))


def _depth(config: Any) -> int:
    """How many layers the encoder applies."""
    encoder = getattr(config, "encoder", config)
    return int(encoder.num_hidden_layers * getattr(encoder, "inner_group_num", 1))
