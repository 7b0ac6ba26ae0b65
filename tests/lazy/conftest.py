"""Tiny Lazy Transformers in double precision, so that rounding decides nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepenough.lazy import (
    LazyTransformerConfig,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)

MECHANISMS = ["lazy", "universal", "act", "transformer"]


def _config(**changes: Any) -> LazyTransformerConfig:
    values = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "encoder_steps": 3}
    values |= {"decoder_steps": 2, "max_positions": 64, "dropout": 0.0}
    return LazyTransformerConfig(**(values | changes))


@pytest.fixture
def make_translator() -> Callable[..., LazyTransformerForConditionalGeneration]:
    def make(**changes: Any) -> LazyTransformerForConditionalGeneration:
        torch.manual_seed(0)
        return LazyTransformerForConditionalGeneration(_config(**changes)).double().eval()

    return make


@pytest.fixture
def make_writer() -> Callable[..., LazyTransformerForCausalLM]:
    def make(**changes: Any) -> LazyTransformerForCausalLM:
        torch.manual_seed(0)
        return LazyTransformerForCausalLM(_config(**changes)).double().eval()

    return make


@pytest.fixture
def sources() -> dict[str, torch.Tensor]:
    """Three sources of 7, 4 and 5 tokens."""
    ids = torch.randint(4, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5]])).long()
    return {"input_ids": ids * mask + 3 * (1 - mask), "attention_mask": mask}
