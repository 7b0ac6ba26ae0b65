"""From logits to tokens, with drafts that are accepted only where they change nothing.

Greedily, a draft is accepted if it is the token that would have been chosen. When sampling from
`p`, a draft `x` is accepted with probability `p(x)`, else a token is drawn from `p` without `x`:

    P(t) = p(x) [t = x] + (1 - p(x)) * p(t) [t != x] / (1 - p(x)) = p(t)

which is rejection sampling (arXiv 2211.17192, 2302.01318) for a draft that is always the same, so
that its own distribution need not be known. `p` is what transformers' processors leave of the
logits. They are called once for every token that is emitted and in that order, as in `generate`.

Shapes: B rows, T places (one more than drafts), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process

from deepenough.decoding.request import SCORES_ONLY, Request
from deepenough.decoding.rows import Row, Stops, groups_of_one_length


class Chooser:
    """Appends to rows the tokens that their logits say; knows nothing of the model."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stops = Stops(request)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        names = {type(each).__name__ for each in request.processors}
        self.scores_only = names <= set(SCORES_ONLY) and all(
            type(each).__module__ == logits_process.__name__ for each in request.processors
        )
        self.plain = not (request.sampled or len(request.processors) or request.keeps_scores)

    def choose(
        self, rows: list[Row], logits_BTV: Tensor, drafts: Sequence[Sequence[int]]
    ) -> list[int]:
        """Append to every row; how many tokens each got, those of its drafts included."""
        before = [len(row.tokens) for row in rows]
        places = logits_BTV.argmax(-1).tolist() if self.plain else None
        going = list(range(len(rows)))
        for place in range(logits_BTV.shape[1]):
            active = [rows[index] for index in going]
            proposed = [_at(drafts[index], place) for index in going]
            if places is not None:
                tokens = [places[index][place] for index in going]
            else:
                whole = len(going) == len(rows)
                logits_BV = logits_BTV[:, place] if whole else logits_BTV[going, place]
                tokens = self._tokens(active, logits_BV, proposed)
            self._append(active, tokens)
            going = [
                index
                for index, token, draft in zip(going, tokens, proposed, strict=True)
                if token == draft and not rows[index].done
            ]
            if not going:
                break
        return [len(row.tokens) - count for row, count in zip(rows, before, strict=True)]

    def _append(self, rows: list[Row], tokens: list[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            row.append(self.request.pad if row.done else token)
        if self.request.streamer is not None:
            self.request.streamer.put(torch.tensor([row.tokens[-1] for row in rows]))
        keeps = self.request.keeps_scores and self.request.config.output_scores
        self.stops.after(rows, tuple(self.scores) if keeps else None)

    def _tokens(self, rows: list[Row], logits_BV: Tensor, drafts: list[int | None]) -> list[int]:
        logits_BV = logits_BV.to(torch.float32, copy=True)
        scores_BV = self._processed(rows, logits_BV)
        if self.request.keeps_scores:
            self.scores.append(scores_BV)
            self.logits.append(logits_BV)
        if not self.request.sampled:
            return scores_BV.argmax(-1).tolist()
        return draw(scores_BV.softmax(-1), drafts)

    def _processed(self, rows: list[Row], logits_BV: Tensor) -> Tensor:
        processors = self.request.processors
        if not len(processors):
            return logits_BV
        device = self.request.ids_BT.device
        if self.scores_only:
            nothing = torch.empty(len(rows), 0, dtype=torch.long, device=device)
            return processors(nothing, logits_BV)  # type: ignore[arg-type]
        groups = groups_of_one_length(rows)
        parts: list[Tensor] = [
            processors(torch.tensor([row.ids for row in group], device=device), part)  # type: ignore[arg-type]
            for group, part in zip(groups, logits_BV.split([len(g) for g in groups]), strict=True)
        ]
        return torch.cat(parts)


def draw(probabilities_BV: Tensor, drafts: Sequence[int | None]) -> list[int]:
    """One token a row from `probabilities_BV`, a row's draft being accepted as often as it can."""
    kept: list[int | None] = [None] * len(drafts)
    if any(draft is not None for draft in drafts):
        chances = torch.rand(len(drafts)).tolist()
        for row, draft in enumerate(drafts):
            if draft is None:
                continue
            if chances[row] < float(probabilities_BV[row, draft]):
                kept[row] = draft
            else:
                probabilities_BV[row, draft] = 0.0
        if None not in kept:
            return [draft for draft in kept if draft is not None]
    drawn = torch.multinomial(probabilities_BV, num_samples=1)[:, 0].tolist()
    return [token if draft is None else draft for token, draft in zip(drawn, kept, strict=True)]


def _at(drafts: Sequence[int], place: int) -> int | None:
    return drafts[place] if place < len(drafts) else None
