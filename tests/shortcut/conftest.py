"""Tiny models, tokenizers and texts."""

import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

WORDS = [f"w{number}" for number in range(90)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(wraps: bool, **tokens: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if wraps:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


@pytest.fixture(scope="session")
def plain() -> PreTrainedTokenizerFast:
    """Words as ids, nothing around them, no padding token: as GPT-2's."""
    return make_tokenizer(wraps=False)


@pytest.fixture(scope="session")
def wrapped() -> PreTrainedTokenizerFast:
    """[CLS] before and [SEP] after: as BERT's."""
    return make_tokenizer(
        wraps=True,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Of 0 to 39 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randrange(40))) for _ in range(150)]


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=95, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=95,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    return BertForMaskedLM(config).eval()


@pytest.fixture
def states() -> list[Tensor]:
    """Four layers of width 6 at 700 positions, far from centred, in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    layers = [draw(700, 6) + 3]
    for _ in range(3):
        layers.append(layers[-1] + torch.tanh(layers[-1] @ draw(6, 6)) + 0.1 * draw(700, 6))
    return layers
