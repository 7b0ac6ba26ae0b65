"""Tiny random models whose greedy text is not one token over and over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deepenough import Shortcuts
from deepenough.decoding.calibration import learn_then_test

VOCABULARY, PAD, END = 40, 0, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": END}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **TOKENS, "num_key_value_heads": 2, **changes}))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **TOKENS, num_key_value_heads=2))


def gpt2() -> PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, **sizes, initializer_range=0.3, **TOKENS)
    )


def neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, **TOKENS))


def opt() -> PreTrainedModel:
    shape = {k: v for k, v in SHAPE.items() if k not in ("intermediate_size", "initializer_range")}
    return OPTForCausalLM(
        OPTConfig(**shape, **TOKENS, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3)
    )


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "qwen2": qwen2,
    "gpt2": gpt2,
    "gpt_neox": neox,
    "opt": opt,
}


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """A model by name; options are those of the config."""

    def make(name: str = "llama", **changes: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        return MODELS[name](**changes).eval().requires_grad_(False)

    return make


@pytest.fixture(params=MODELS)
def model(
    request: pytest.FixtureRequest, make_model: Callable[..., PreTrainedModel]
) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def small(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="session")
def prompts() -> Callable[..., dict[str, Tensor]]:
    """Rows of 4, 6, 7, 7 ... tokens, padded on the left."""

    def make(rows: int, width: int = 7, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[0, :3], mask[1, :1] = 0, 0
        return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def shortcuts() -> Shortcuts:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(300, 32, generator=generator)]
    for _ in range(3):
        states.append(states[-1] + 0.5 * torch.randn(300, 32, generator=generator))
    return Shortcuts.fit_states(states)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of three layers and its tokenizer, whose words are w1 ... w29."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    llama(
        vocab_size=30, hidden_size=16, intermediate_size=24, initializer_range=0.4
    ).save_pretrained(folder)
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 30)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def words_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 lines of 12 words."""
    file = tmp_path_factory.mktemp("text") / "words.txt"
    rows = torch.randint(3, 30, (70, 12), generator=torch.Generator().manual_seed(0))
    file.write_text("\n".join(" ".join(f"w{number}" for number in row) for row in rows.tolist()))
    return file


@pytest.fixture(scope="session")
def failures() -> Callable[..., float]:
    """How often a guarantee fails: over random halves, one to calibrate and one to test.

    Where no threshold holds the full model is used, which never errs.
    """

    def measure(
        losses_NT: Tensor, thresholds: list[float], max_risk: float = 0.05, splits: int = 100
    ) -> float:
        generator = torch.Generator().manual_seed(0)
        exceeded, half = 0, len(losses_NT) // 2
        for _ in range(splits):
            order = torch.randperm(len(losses_NT), generator=generator)
            columns = dict(zip(thresholds, losses_NT[order[:half]].unbind(1), strict=True))
            found, _, _ = learn_then_test(columns.__getitem__, thresholds, max_risk)
            if found is not None:
                column = thresholds.index(found)
                exceeded += float(losses_NT[order[half:], column].mean()) > max_risk
        return exceeded / splits

    return measure
