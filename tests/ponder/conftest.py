"""Tiny encoders of several architectures, and pondering models whose examples differ in depth."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerFast

from deepenough.ponder.modeling import (
    PonderAlbertConfig,
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)
from deepenough.runs import Record

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 8},
    "distilbert": {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24},
    "electra": {"embedding_size": 8},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 4, "layer_types": None},
}
WORDS = (
    "the",
    "film",
    "is",
    "a",
    "long",
    "good",
    "bad",
    "dull",
    "very",
    "warm",
    "story",
    "and",
    "not",
)


def tiny_encoder(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    values = SIZES | OWN.get(kind, {}) | changes
    values = {key: value for key, value in values.items() if value is not None}
    if kind == "distilbert":
        values = {key: value for key, value in values.items() if key not in SIZES} | {
            key: SIZES[key] for key in ("vocab_size", "max_position_embeddings", "pad_token_id")
        }
    model = AutoModel.from_config(AutoConfig.for_model(kind, **values)).eval()
    with torch.no_grad():  # away from the small weights of a new model, so that layers matter
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def unsettle(model: Any, seed: int = 0) -> Any:
    """Weights of the heads with which examples halt at different passes."""
    generator = torch.Generator().manual_seed(seed)
    heads = [(n, p) for n, p in model.named_parameters() if not n.startswith(("trunk.", "albert."))]
    assert heads
    with torch.no_grad():
        for name, parameter in heads:
            if not name.endswith("bias"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.3 if "halting" in name else 1.0))
    return model.eval()


def a_batch(rows: int = 9, length: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts of different lengths, padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (rows, length), generator=generator)
    ids[:, 0] = 2
    lengths = torch.randint(3, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask}


@pytest.fixture
def make_encoder() -> Callable[..., PreTrainedModel]:
    return tiny_encoder


@pytest.fixture
def make_model() -> Callable[..., PonderEncoderForSequenceClassification]:
    def make(kind: str = "bert", seed: int = 0, encoder: Any = None, **options: Any) -> Any:
        encoder = tiny_encoder(kind, **(encoder or {}))
        options = {"num_labels": 3, **options}
        torch.manual_seed(seed)
        model = PonderEncoderForSequenceClassification.from_encoder(encoder, **options)
        return unsettle(model, seed)

    return make


@pytest.fixture
def make_albert() -> Callable[..., PonderAlbertForSequenceClassification]:
    def make(seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        values = SIZES | OWN["albert"] | {"num_labels": 3, "initializer_range": 0.2} | options
        return unsettle(PonderAlbertForSequenceClassification(PonderAlbertConfig(**values)), seed)

    return make


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return a_batch()


@pytest.fixture
def make_batch() -> Callable[..., dict[str, torch.Tensor]]:
    return a_batch


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    special["sep_token"] = "[SEP]"
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *WORDS]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, reviews: Path, tiny_bert: Path) -> Path:
    """Return a run of a small classifier that learned the reviews."""
    from deepenough.config import resolve
    from deepenough.ponder.config import PonderTrainConfig
    from deepenough.ponder.training import train

    folder = tmp_path_factory.mktemp("trained") / "run"
    values = {
        "out": str(folder),
        "data": str(reviews),
        "dataset.batch_size": 8,
        "model.encoder": str(tiny_bert),
        "ponder.pooling": "mean",
        "ponder.halting_target": 0.4,
        "train.lr": 0.01,
        "train.warmup": 5,
        "train.valid_every": 40,
        "epochs": 4.0,
        "head_lr": 1.0,
    }
    train(resolve(PonderTrainConfig, overrides=values))
    return folder


@pytest.fixture
def same_records() -> Callable[[list[Record], list[Record]], None]:
    """Compare the records of two runs, floats to within a ten-thousandth."""

    def compare(left: list[Record], right: list[Record]) -> None:
        assert [(r.step, r.kind) for r in left] == [(r.step, r.kind) for r in right]
        for one, other in zip(left, right, strict=True):
            numbers = {k: v for k, v in other.values.items() if isinstance(v, float)}
            rest = {k: v for k, v in other.values.items() if k not in numbers}
            close = pytest.approx(numbers, rel=1e-4, abs=1e-6)
            assert {k: v for k, v in one.values.items() if k in numbers} == close
            assert {k: v for k, v in one.values.items() if k not in numbers} == rest

    return compare
