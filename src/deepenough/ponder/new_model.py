"""A new pondering classifier, from an encoder's name or from a config alone, with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig

from deepenough.data.corpus import candidates
from deepenough.errors import UserError
from deepenough.hf.loading import load
from deepenough.ponder import (
    PonderAlbertConfig,
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.settings import PonderSettings

ALBERT = "albert"


@dataclass
class EncoderSettings:
    """Encoder"""

    encoder: str = "minilm"
    """Encoder to start from: minilm, a folder, a hub name, or a config.json for new weights."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, also under $DEEPENOUGH_DATA; by default the encoder's
    own. A folder with only a spiece.model or a vocab.txt is read as ALBERT's or BERT's."""

    revision: str | None = None
    """Branch, tag or commit of a hub name."""

    dropout: float | None = None
    """Dropout inside the encoder; by default its own. Drawing it is slow on a CPU: 0 trains a third
    faster there, and short fine-tunings hardly need it."""


def make_classifier(
    encoder: EncoderSettings, ponder: PonderSettings, labels: Sequence[str]
) -> tuple[PonderClassifier, Any]:
    """The model and its tokenizer; weights that are new are drawn from torch's generator."""
    options: dict[str, Any] = asdict(ponder) | {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
    base: Any
    if encoder.encoder.endswith(".json"):
        config, tokenizer = _read_config(encoder.encoder), None
        base = None if config.model_type == ALBERT else AutoModel.from_config(config)
    else:
        base, tokenizer = load(encoder.encoder, kind="encoder", revision=encoder.revision)
        config = base.config
    if encoder.tokenizer is not None:
        tokenizer = load_tokenizer(encoder.tokenizer, config.model_type)
    if tokenizer is None:
        raise UserError(
            f"The config {encoder.encoder} comes without a tokenizer: give model.tokenizer."
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens, but the encoder's vocabulary only "
            f"{config.vocab_size}: give the tokenizer that belongs to it."
        )
    model: PonderClassifier
    if config.model_type == ALBERT:
        model = _albert(config, base, options)
    else:
        model = PonderEncoderForSequenceClassification.from_encoder(base, **options)
    if encoder.dropout is not None:
        _set_dropout(model.encoder_model, encoder.dropout)
    return model, tokenizer


def _set_dropout(model: nn.Module, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout must be at least 0 and below 1: got {dropout}.")
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout


def _albert(config: PreTrainedConfig, base: Any, options: dict[str, Any]) -> PonderClassifier:
    values = {key: value for key, value in config.to_dict().items() if key not in options}
    values.pop("model_type", None)
    model = PonderAlbertForSequenceClassification(PonderAlbertConfig(**values, **options))
    if base is not None:
        model.albert.load_state_dict(base.state_dict())
    return model


def _read_config(name: str) -> PreTrainedConfig:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"There is no config file {name}: give one that AutoConfig reads.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"The config {name} cannot be read: {reason}.") from error
    return config


def load_tokenizer(name: str, model_type: str) -> Any:
    """A tokenizer by folder or hub name; bare vocabulary files of BERT and ALBERT do as well."""
    place = next((str(path) for path in candidates(name) if path.is_dir()), name)
    folder = Path(place)
    bare = folder.is_dir() and not (folder / "tokenizer_config.json").is_file()
    try:
        if bare:  # nothing there says whose tokenizer it is, so the encoder does
            config = AutoConfig.for_model(model_type)
            return AutoTokenizer.from_pretrained(place, config=config)
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # transformers and the hub's client raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"The tokenizer {name} cannot be loaded: {reason}.") from error
