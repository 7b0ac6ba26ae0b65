"""What a model writes by itself: prompts continued greedily, with the states behind every word.

Maps are fitted on this, because what a model writes is not what it reads.

Shapes: B texts, T tokens, N positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.adaptive.exit.accelerate import accelerate
from deepenough.models.hf import Adapter

#: Shorter prompts say too little.
_LEAST = 4


@dataclass
class Written:
    """One text: its tokens, the normed last state of each, and where the prompt ended."""

    ids_T: Tensor
    states_TD: Tensor
    prompt: int


@dataclass(frozen=True)
class WritingSettings:
    """How much is written, and from what."""

    tokens: int = 30_000
    """New tokens in all; fewer if the texts run out."""
    prompt_tokens: int = 32
    """Tokens of a text that are its prompt."""
    new_tokens: int = 96
    """New tokens of each text at most."""
    batch: int = 16
    """Texts written side by side."""


def write(
    model: PreTrainedModel,
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    settings: WritingSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Written]:
    """Texts the model writes, until there are enough tokens; `progress` gets done and wanted."""
    fast = accelerate(model)
    prompts = _prompts(tokenizer, texts, settings.prompt_tokens)
    done = 0
    while done < settings.tokens and (batch := list(islice(prompts, settings.batch))):
        widest = max(map(len, batch))
        ids = torch.zeros(len(batch), widest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, widest - len(prompt) :] = torch.tensor(prompt)
            mask[row, widest - len(prompt) :] = 1
        sequences = fast.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=settings.new_tokens,
            do_sample=False,
            # The sentence a pad token is missing in is of no interest here.
            pad_token_id=model.generation_config.pad_token_id or 0,  # type: ignore[union-attr]
        )
        new = fast.trace.depth.gt(0).sum(1).tolist()
        written = [
            sequences[row, widest - len(prompt) : widest + new[row]].cpu()
            for row, prompt in enumerate(batch)
        ]
        for text, prompt in zip(_with_states(adapter, written), batch, strict=True):
            done += len(text[0]) - len(prompt)
            yield Written(*text, prompt=len(prompt))
        if progress is not None:
            progress(min(done, settings.tokens), settings.tokens)


def _prompts(tokenizer: Any, texts: Iterable[str], length: int) -> Iterator[list[int]]:
    for text in texts:
        ids = tokenizer(text)["input_ids"][:length]
        if len(ids) >= _LEAST:
            yield ids


@torch.no_grad()
def _with_states(adapter: Adapter, texts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    ids_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask_BT = torch.zeros_like(ids_BT)
    for row, text in enumerate(texts):
        mask_BT[row, : len(text)] = 1
    device = adapter.model.device
    last_BTD = adapter.states(ids_BT.to(device), mask_BT.to(device))[-1]
    normed_BTD = adapter.final_norm(last_BTD)
    return [(text, normed_BTD[row, : len(text)]) for row, text in enumerate(texts)]
