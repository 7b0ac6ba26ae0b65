"""What a prediction from an early layer is worth, beside the last layer's.

As in Jump to Conclusions (arXiv 2303.09435), of the token `v` that the early layer finds likeliest:

- precision@k: is `v` among the `k` likeliest of the last layer?
- surprisal: `-log p_L(v)` in nats, with `p_L` the last layer's distribution.

And of the early distribution `q` as a whole: `KL(p_L || q)` in nats (as the tuned lens, arXiv
2303.08112), and the gap between its two largest probabilities, its confidence.

Written out, `KL = sum p log p - sum p x + log sum exp x` with the logits `x` of `q`: `q` itself is
never made, and all passes over its logits are made while they are in the cache.

Shapes: N tokens, V words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PRECISIONS = (1, 5, 10)

#: Rows of logits that are worked on at once, small enough to stay in a processor's cache.
_ROWS = 16
#: Columns that are reduced to their largest before the two largest of a row are looked for.
_BLOCK = 128
#: In the place of a logit of -inf, whose product with a probability of 0 is to be 0.
_RULED_OUT = -1e30


class Scores(NamedTuple):
    """Per token, `[N]` each; `rank` is the place of the token in the last layer's order, from 0,
    and as large as the largest precision counted if it comes later."""

    token: Tensor
    gap: Tensor
    rank: Tensor
    surprisal: Tensor
    kl: Tensor


class Reference:
    """The last layer's predictions, to which all others are compared."""

    def __init__(self, logits_NV: Tensor) -> None:
        log_probs = torch.log_softmax(logits_NV.float(), dim=-1)
        self.log_probs_NV = log_probs
        self.probs_NV = log_probs.exp()
        self.negentropy_N = torch.linalg.vecdot(self.probs_NV, log_probs.clamp_min(_RULED_OUT))
        top = log_probs.topk(min(PRECISIONS[-1], log_probs.shape[-1]))
        self.order_NK = top.indices

    def scores(self) -> Scores:
        """Of the last layer itself: it agrees, but may be surprised at its own choice."""
        token = self.order_NK[:, 0]
        two = self.log_probs_NV.gather(1, self.order_NK[:, :2]).exp()
        zero = torch.zeros_like(self.negentropy_N)
        surprisal = -self.log_probs_NV.gather(1, token[:, None])[:, 0]
        return Scores(token, two[:, 0] - two[:, -1], torch.zeros_like(token), surprisal, zero)

    def score(self, logits_NV: Tensor) -> Scores:
        """Compare other logits for the same tokens."""
        parts = [
            self._score(logits_NV[start : start + _ROWS], slice(start, start + _ROWS))
            for start in range(0, len(logits_NV), _ROWS)
        ]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _score(self, logits: Tensor, rows: slice) -> Scores:
        logits = logits.float()
        largest, second, token = top_two(logits)
        expected = torch.linalg.vecdot(logits, self.probs_NV[rows])
        if bool(expected.isnan().any()):  # words that are ruled out: -inf at a probability of 0
            expected = torch.linalg.vecdot(logits.clamp_min(_RULED_OUT), self.probs_NV[rows])
        total = (logits - largest[:, None]).exp_().sum(-1)  # of probabilities over the largest
        kl = self.negentropy_N[rows] - expected + largest + total.log()
        surprisal = -self.log_probs_NV[rows].gather(1, token[:, None])[:, 0]
        hits = self.order_NK[rows] == token[:, None]
        rank = torch.where(hits.any(1), hits.to(torch.uint8).argmax(1), PRECISIONS[-1])
        gap = (1 - (second - largest).exp()) / total
        return Scores(token, gap, rank, surprisal, kl.clamp_min(0))


def top_two(values_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of each row, the second largest, and the column of the first.

    `torch.topk` sorts on a CPU; the largest of blocks of columns, of which then two are looked
    into, need one pass at the speed of memory.
    """
    width = values_NV.shape[1]
    blocks, rest = divmod(width, _BLOCK)
    if blocks < 2:
        value, index = values_NV.topk(min(2, width))
        return value[:, 0], value[:, -1], index[:, 0]
    maxima = values_NV[:, : width - rest].unflatten(1, (blocks, _BLOCK)).amax(-1)
    if rest:
        maxima = torch.cat((maxima, values_NV[:, -rest:].amax(-1, keepdim=True)), dim=1)
    best = maxima.topk(2)
    # The columns of the best block; the last block is short and is filled up from its end.
    inside = torch.arange(_BLOCK, device=values_NV.device)
    columns = (best.indices[:, :1] * _BLOCK + inside).clamp_max(width - 1)
    found = values_NV.gather(1, columns)
    place = found.argmax(1, keepdim=True)
    token = columns.gather(1, place)
    # Of the same block, without the token (which may stand several times in a filled-up one).
    others = found.masked_fill(columns == token, -torch.inf).amax(1)
    return found.gather(1, place)[:, 0], torch.maximum(others, best.values[:, 1]), token[:, 0]


def score_ref(logits_NV: Tensor, last_logits_NV: Tensor) -> Scores:
    """The definitions, token by token."""
    rows: list[tuple[float, ...]] = []
    for logits, last in zip(logits_NV.double(), last_logits_NV.double(), strict=True):
        p, q = last.softmax(0), logits.softmax(0)
        token = int(q.argmax())
        one, two = q.sort(descending=True).values[:2].tolist()
        rank = min(int((p > p[token]).sum()), PRECISIONS[-1])
        kl = float((p * (p.log() - q.log())).sum())
        rows.append((token, one - two, rank, -float(p[token].log()), kl))
    token_, gap, rank_, surprisal, kl_ = (
        torch.tensor(column) for column in zip(*rows, strict=True)
    )
    return Scores(token_, gap, rank_, surprisal, kl_)
