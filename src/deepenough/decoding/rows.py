"""The rows of a generation: their tokens, when they end, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from deepenough.decoding.request import Request


@dataclass
class Row:
    """One text on its way."""

    number: int
    """Its place among the prompts."""
    prompt: list[int]
    """As it was given, with padding."""
    context: list[int]
    """All tokens so far, without padding; the last has not been through the model yet."""
    tokens: list[int] = field(default_factory=list)
    """The new ones."""
    depths: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    done: bool = False

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.context.append(token)

    @property
    def ids(self) -> list[int]:
        """What transformers would call `input_ids` by now."""
        return self.prompt + self.tokens


def make_rows(request: Request) -> list[Row]:
    prompts = request.ids_BT.tolist()
    if request.mask_BT is None:
        return [Row(number, prompt, list(prompt)) for number, prompt in enumerate(prompts)]
    masks = request.mask_BT.tolist()
    return [
        Row(n, prompt, [token for token, seen in zip(prompt, mask, strict=True) if seen])
        for n, (prompt, mask) in enumerate(zip(prompts, masks, strict=True))
    ]


class Stops:
    """When a row ends. Length and end tokens are looked at here, the rest by transformers."""

    def __init__(self, request: Request) -> None:
        self.max_length = request.max_length
        self.device = request.ids_BT.device
        self.ends: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in request.criteria:
            if type(criterion) is EosTokenCriteria:
                self.ends |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)

    def after(self, rows: list[Row], scores: tuple[Tensor, ...] | None = None) -> None:
        """Mark the rows that their last token has ended; all have just got one.

        `scores` are those of all tokens so far, where they are kept, for criteria that look at
        them.
        """
        for row in rows:
            row.done = row.done or row.tokens[-1] in self.ends
            row.done = row.done or len(row.prompt) + len(row.tokens) >= self.max_length
        if not self.others:
            return
        for group in groups_of_one_length(rows):
            ids = torch.tensor([row.ids for row in group], device=self.device)
            ended = self.others(ids, scores)  # type: ignore[arg-type]
            for row, end in zip(group, ended.tolist(), strict=True):
                row.done = row.done or end


def groups_of_one_length(rows: list[Row]) -> list[list[Row]]:
    """All rows in one group if they are equally long, else each alone: then nothing looks at the
    batch as a whole (`Request.in_step`)."""
    if len({len(row.tokens) for row in rows}) == 1:
        return [rows]
    return [[row] for row in rows]
