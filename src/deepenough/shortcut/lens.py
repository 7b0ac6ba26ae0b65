"""The words that every layer would say at every token of a prompt: a logit lens through shortcuts.

(The logit lens of nostalgebraist, 2020, is mode `id`; arXiv 2303.09435 and 2303.08112 put a map to
the last layer before the head.)
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.runs import Record
from deepenough.shortcut.modeling import Shortcuts


@torch.no_grad()
def lens(
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    shortcuts: Shortcuts,
    prompt: str,
    mode: str | None = None,
) -> Record:
    """For all layers (with tuned maps: that have one) and every token of the prompt: the likeliest
    word, its probability, and whether it is the last layer's. A causal model predicts the next
    token, a masked model the token itself (put its mask token where it shall guess)."""
    adapter = model if isinstance(model, Adapter) else adapt(model)
    shortcuts.check_model(adapter)
    mode = mode or shortcuts.mode
    ids = _encode(adapter, tokenizer, prompt)
    states = adapter.states(ids, attention_mask=torch.ones_like(ids))
    last = adapter.num_layers
    layers = list(range(last + 1))
    if mode == "tuned" and shortcuts.tuned:  # perhaps of some layers alone
        layers = sorted({*shortcuts.tuned, last})
    tokens, probabilities = [], []
    for layer in layers:
        hidden = shortcuts.apply(states[layer][0], layer, last, mode)
        probability, token = adapter.logits(hidden).float().softmax(-1).max(-1)
        tokens.append(token.cpu())
        probabilities.append(probability.tolist())
    return Record(
        0,
        "lens",
        {
            "prompt": prompt,
            "mode": mode,
            "tokens": _words(tokenizer, ids[0].tolist()),
            "layers": layers,
            "words": [_words(tokenizer, row.tolist()) for row in tokens],
            "probability": probabilities,
            "agrees": [(row == tokens[-1]).tolist() for row in tokens],
        },
    )


def _encode(adapter: Adapter, tokenizer: Any, prompt: str) -> torch.Tensor:
    ids = tokenizer(prompt, verbose=False)["input_ids"] if prompt.strip() else []
    if not ids:
        raise UserError("The prompt has no tokens: give a few words.")
    limit = adapter.max_length
    if limit is not None and len(ids) > limit:
        raise UserError(
            f"The prompt has {len(ids)} tokens and the model reads {limit}: give a shorter one."
        )
    return torch.tensor([ids], device=adapter.model.device)


def _words(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as text by itself: a table has one cell for each."""
    return [tokenizer.decode([token]) for token in ids]
