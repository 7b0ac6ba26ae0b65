"""What a model writes by itself: prompts continued, with the state behind every word.

Maps and draft heads are fitted on this, because what a model writes is not what it reads. States
are kept as the generation makes them, so that no text is run twice. Words are the model's most
probable ones, or drawn; what a generation config does to scores besides that is left out.

Shapes: B texts, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.decoding.engine import Engine, make_engine
from deepenough.decoding.request import SequenceState, plain_request
from deepenough.decoding.verification import decode
from deepenough.errors import UserError

#: Shorter prompts say too little.
LEAST_PROMPT = 4


@dataclass
class Written:
    """One text: its tokens, and where the prompt ended."""

    ids_T: Tensor
    states_TD: Tensor
    """The normed last state of every token but the last, which has not been through the model."""
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
    tokenizer: Any,
    texts: Iterable[str],
    settings: WritingSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Written]:
    """Texts the model writes, until there are enough tokens; `progress` gets done and wanted."""
    engine = make_engine(model)
    prompts = beginnings(tokenizer, texts, settings.prompt_tokens)
    done = 0
    while done < settings.tokens and (batch := list(islice(prompts, settings.batch))):
        for text in continue_prompts(engine, batch, settings.new_tokens):
            done += len(text.ids_T) - text.prompt
            yield text
        if progress is not None:
            progress(min(done, settings.tokens), settings.tokens)


def beginnings(tokenizer: Any, texts: Iterable[str], length: int) -> Iterator[list[int]]:
    for text in texts:
        ids = tokenizer(text)["input_ids"][:length]
        if len(ids) >= LEAST_PROMPT:
            yield ids


@torch.inference_mode()
def continue_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    generator: torch.Generator | None = None,
) -> list[Written]:
    """Continue prompts side by side, greedily, or by drawing if there is a `generator`."""
    limit, longest = engine.adapter.max_length, max(map(len, prompts))
    if limit is not None and longest + new_tokens > limit:
        raise UserError(
            f"Prompts of {longest} tokens and {new_tokens} new ones do not fit the model's "
            f"{limit}: ask for at most {max(limit - longest, 0)} new tokens."
        )
    device = engine.adapter.model.device
    ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask_BT = (torch.arange(ids_BT.shape[1]) < lengths[:, None]).long()
    request = plain_request(
        engine.adapter.model,
        ids_BT.to(device),
        mask_BT.to(device),
        new_tokens,
        limit,
        generator=generator,
    )
    recorder = StateRecorder()
    engine.refresh()
    decoded = decode(engine, request, recorder)
    if decoded.interrupted:
        raise KeyboardInterrupt
    engine.release()
    return [
        Written(torch.tensor(row.context), torch.cat(parts), len(prompt))
        for row, parts, prompt in zip(decoded.rows, recorder.states, prompts, strict=True)
    ]


class StateRecorder(Drafter):
    """Drafts nothing, and keeps the normed states of every sequence."""

    def __init__(self) -> None:
        super().__init__(num_draft_tokens=1)
        self.states: list[list[Tensor]] = []
        """Of each sequence, states `[T, D]` of its prompt and then of each new token."""

    def begin(self, engine: Engine) -> None:
        """Keep the states of the prompts."""
        self.states = [[engine.norm(hidden_TD)] for hidden_TD in engine.prompt]

    def observe(self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        """Keep the states of the tokens that went through the model."""
        for row, states_TD, count in zip(rows, normed_BTD, counts, strict=True):
            self.states[row.index].append(states_TD[:count])

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return no drafts."""
        return Proposal([[] for _ in rows])
