"""Tiny models and a tokenizer of whole words, for measuring shortcuts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "intermediate_size": 24,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=16, n_layer=3, n_head=2, n_positions=40)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SHAPE)),
    "encoder": lambda: BertModel(BertConfig(**SHAPE)),
}


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], PreTrainedModel]:
    def make(name: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = MODELS[name]().eval().requires_grad_(False)
        for parameter in model.parameters():  # of a size at which every part matters
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        return model

    return make


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, 60)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """120 texts of 1 to 12 words; the few of one word are too short to measure."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 13, (120,), generator=generator).tolist()
    return [
        " ".join(f"w{i}" for i in torch.randint(3, 60, (n,), generator=generator).tolist())
        for n in lengths
    ]
