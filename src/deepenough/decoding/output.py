"""What an accelerated `generate` returns: as transformers, with the `DepthTrace` added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from deepenough.decoding.rows import Row
from deepenough.trace import DepthTrace


@dataclass
class ExitOutput(GenerateDecoderOnlyOutput):
    """`sequences`, `scores` and `logits` as in transformers."""

    trace: DepthTrace | None = None
    """Depth and cost of every new token `[B, new tokens]`; zeros where a row had ended,
    or an interruption came before a token was accounted for."""
    passes: int | None = None
    """How often the model ran after the prompt."""
    drafted: int | None = None
    """Tokens that were guessed."""
    accepted: int | None = None
    """Guesses that the model confirmed."""
    interrupted: bool | None = None
    """Whether Ctrl-C ended the generation early."""


def sequences_of(rows: list[Row], pad: int, device: torch.device) -> Tensor:
    """Prompts and new tokens, rows that ended early filled with padding: `[B, T]`."""
    longest = max(len(row.tokens) for row in rows)
    return torch.tensor(
        [row.ids + [pad] * (longest - len(row.tokens)) for row in rows], device=device
    )


def trace_of(rows: list[Row], num_layers: int) -> DepthTrace:
    """Every new token's depth and cost; a token runs all layers up to its depth."""
    longest = max(len(row.tokens) for row in rows)
    depth = torch.zeros(len(rows), longest, dtype=torch.long)
    flops = torch.zeros(len(rows), longest, dtype=torch.float64)
    for place, row in enumerate(rows):
        depth[place, : len(row.depths)] = torch.tensor(row.depths, dtype=torch.long)
        flops[place, : len(row.flops)] = torch.tensor(row.flops, dtype=torch.float64)
    ran = torch.arange(num_layers) < depth[..., None]
    return DepthTrace(depth=depth, ran=ran, flops=flops)
