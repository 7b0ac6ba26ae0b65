"""Quality of language models: loss over a whole text, and what follows from it.

Perplexity is `exp(total loss / total tokens)`, never a mean over batches of exponentials. Since a
token is whatever the tokenizer makes it, two figures compare across tokenizers: perplexity per
word, `exp(total loss / words)`, and bits per byte, `total loss / (bytes ln 2)`. Both scale the mean
loss to the whole text, because the last few tokens fill no batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TextSize:
    tokens: int
    words: int
    bytes: int


def language_values(loss_sum: float, num_tokens: int, size: TextSize) -> dict[str, float]:
    """The figures of one evaluation; `loss_sum` is in nats over `num_tokens` predicted tokens."""
    loss = loss_sum / num_tokens
    return {
        "loss": loss,
        "perplexity": _exp(loss),
        "word_perplexity": _exp(loss * size.tokens / size.words),
        "bits_per_byte": loss * size.tokens / size.bytes / math.log(2.0),
        "tokens": num_tokens,
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
