"""What an early layer predicts: shown for a prompt (`lens`), and compared with the last layer.

The lens shows the token that every layer would predict at every token of a prompt: a logit lens
through shortcuts. (The logit lens of nostalgebraist, 2020, is mode `id`; arXiv 2303.09435 and
2303.08112 put a map to the last layer before the head.)

`Reference` scores predictions as in Jump to Conclusions (arXiv 2303.09435). Of the token `v` that
the early layer finds likeliest:

- precision@k: is `v` among the `k` likeliest of the last layer?
- surprisal: `-log p_L(v)` in nats, with `p_L` the last layer's distribution.

And of the early distribution `q` as a whole the gap between its two largest probabilities, its
confidence, and what the tuned lens reports (arXiv 2303.08112), in nats: `KL(p_L || q)`, the entropy
of `q`, and of the token that really comes next its cross-entropy `-log q(token)` and its rank in
`q`.

Written out, `KL = sum p log p - sum p x + log sum exp x` with the logits `x` of `q`: `q` itself is
never made, and all passes over its logits are made while they are in the cache.

Shapes: N tokens, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.data.tokenizer import check_text
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import eval_mode
from deepenough.runs import Record
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import check_vocabulary
from deepenough.shortcut.statistics import check_finite

PRECISIONS = (1, 5, 10)
#: What the tuned lens reports beside KL: the entropy, and two scores of the real next token.
TARGET_SCORES = ("entropy", "cross_entropy", "target_rank")

#: Rows of logits that are worked on at once, small enough to stay in a processor's cache.
_ROWS = 16
#: In the place of a logit of -inf, whose product with a probability of 0 is to be 0.
_RULED_OUT = -1e30


@torch.no_grad()
def lens(
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    shortcuts: Shortcuts,
    prompt: str,
    mode: str | None = None,
) -> Record:
    """Return, for every layer and token of a prompt, the prediction and whether it is the last's.

    Of each there are the ten likeliest tokens, the KL to the last layer, the entropy, and rank and
    cross-entropy of the token that really comes next.
    A causal model predicts the next token, a masked model the token itself (put its mask token
    where it shall guess). The mode is "id", "mat", "affine" or "tuned"; by default the maps are
    used as they were fitted. With tuned maps, only layers that have one are shown.
    """
    adapter = model if isinstance(model, Adapter) else adapt(model)
    adapter.check_made_for(shortcuts.made_for, "These shortcuts")
    mode = mode or shortcuts.mode
    ids = _encode(adapter, tokenizer, prompt)
    last = adapter.num_layers
    layers = list(range(last + 1))
    if mode == "tuned" and shortcuts.tuned:  # perhaps of some layers alone
        layers = sorted({*shortcuts.tuned, last})
    targets = ids[0]
    if adapter.kind == "causal":
        targets = torch.cat([ids[0, 1:], ids.new_tensor([-1])])
    tokens: list[Tensor] = []
    probabilities: list[list[list[float]]] = []
    statistics: dict[str, list[list[float | None]]] = {}
    with eval_mode(adapter.model):
        states = adapter.states(ids, attention_mask=torch.ones_like(ids))
        check_finite(states)
        final = Reference(adapter.logits(states[last][0]))
        for layer in layers:
            hidden = shortcuts.apply(states[layer][0], layer, last, mode)
            logits = adapter.logits(hidden)
            reference = Reference(logits, targets)
            own = reference.scores()._asdict() | {"kl": final.score(logits).kl}
            tokens.append(reference.order_NK.cpu())
            largest_NK = reference.probs_NV.gather(1, reference.order_NK)
            probabilities.append(largest_NK.tolist())
            for name in ("kl", *TARGET_SCORES):
                row = exact(own[name]).tolist()
                statistics.setdefault(name, []).append([v if v >= 0 else None for v in row])
    top = [[_decoded(tokenizer, row) for row in rows.tolist()] for rows in tokens]
    return Record(
        0,
        "lens",
        {
            "prompt": prompt,
            "mode": mode,
            "tokens": _decoded(tokenizer, ids[0].tolist()),
            "layers": layers,
            "words": [[row[0] for row in rows] for rows in top],
            "probability": [[row[0] for row in rows] for rows in probabilities],
            "agrees": [(rows[:, 0] == tokens[-1][:, 0]).tolist() for rows in tokens],
            "top": top,
            "top_probability": [[[round(p, 5) for p in r] for r in rows] for rows in probabilities],
            **statistics,
        },
    )


def _encode(adapter: Adapter, tokenizer: Any, prompt: str) -> torch.Tensor:
    words = check_text(prompt).strip()
    ids = tokenizer(prompt, verbose=False)["input_ids"] if words else []
    if not ids:
        raise UserError("The prompt has no tokens: give a few words.")
    check_vocabulary(adapter, max(ids))
    limit = adapter.max_length
    if limit is not None and len(ids) > limit:
        raise UserError(
            f"The prompt has {len(ids)} tokens and the model reads {limit}: give a shorter one."
        )
    return torch.tensor([ids], device=adapter.model.device)


def _decoded(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return each token as text by itself: a table has one cell for each."""
    return [tokenizer.decode([token]) for token in ids]


class TokenScores(NamedTuple):
    """Scores of an early layer's predictions, `[N]` each."""

    gap: Tensor
    """Difference of its two largest probabilities."""
    rank: Tensor
    """Place of its likeliest token in the last layer's order, from 0; the largest precision counted
    if it comes later."""
    surprisal: Tensor
    kl: Tensor
    entropy: Tensor
    cross_entropy: Tensor
    """Of the real next token; NaN where none is known."""
    target_rank: Tensor
    """Place of the real next token in the layer's own order, from 1; -1 where none is known."""
    top: Tensor
    """Its likeliest tokens, `[N, K]`, as many as are kept."""


class Reference:
    """The last layer's predictions, to which all others are compared."""

    def __init__(self, logits_NV: Tensor, targets_N: Tensor | None = None, num_top: int = 0):
        """Take the last layer's logits and the tokens that really come next, -1 where unknown.

        Of the likeliest tokens, `TokenScores` keep `num_top`, at most 10.
        """
        log_probs = torch.log_softmax(logits_NV.float(), dim=-1)
        if targets_N is None:
            targets_N = torch.full((len(log_probs),), -1)
        self.targets_N = targets_N.to(log_probs.device)
        self.num_top = num_top
        self.log_probs_NV = log_probs
        self.probs_NV = log_probs.exp()
        self.negentropy_N = torch.linalg.vecdot(self.probs_NV, log_probs.clamp_min(_RULED_OUT))
        self.order_NK = log_probs.topk(min(PRECISIONS[-1], log_probs.shape[-1])).indices

    def scores(self) -> TokenScores:
        """Return the last layer's own scores: it agrees, but may be surprised at its choice."""
        token = self.order_NK[:, 0]
        two = self.log_probs_NV.gather(1, self.order_NK[:, :2]).exp()
        zero = torch.zeros_like(self.negentropy_N)
        surprisal = -self.log_probs_NV.gather(1, token[:, None])[:, 0]
        return TokenScores(
            two[:, 0] - two[:, 1],
            torch.zeros_like(token),
            surprisal,
            zero,
            -self.negentropy_N,
            *_of_targets(self.log_probs_NV, zero, self.targets_N),
            self.order_NK[:, : self.num_top],
        )

    def score(self, logits_NV: Tensor) -> TokenScores:
        """Return the scores of an early layer's logits for the same tokens."""
        parts = [
            self._score(logits_NV[start : start + _ROWS], slice(start, start + _ROWS))
            for start in range(0, len(logits_NV), _ROWS)
        ]
        return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _score(self, logits: Tensor, rows: slice) -> TokenScores:
        logits = logits.float()
        values, tokens = logits.topk(max(2, min(self.num_top, logits.shape[-1])))
        largest, second, token = values[:, 0], values[:, 1], tokens[:, 0]
        shifted = logits - largest[:, None]
        expected = torch.linalg.vecdot(shifted, self.probs_NV[rows])
        if bool(expected.isnan().any()):  # tokens that are ruled out: -inf at a probability of 0
            shifted.clamp_min_(_RULED_OUT)
            expected = torch.linalg.vecdot(shifted, self.probs_NV[rows])
        ratios = shifted.exp()  # of probabilities over the largest
        total = ratios.sum(-1)
        entropy = total.log() - torch.linalg.vecdot(ratios, shifted) / total
        kl = self.negentropy_N[rows] - expected + total.log()
        surprisal = -self.log_probs_NV[rows].gather(1, token[:, None])[:, 0]
        hits = self.order_NK[rows] == token[:, None]
        rank = torch.where(hits.any(1), hits.to(torch.uint8).argmax(1), PRECISIONS[-1])
        gap = (1 - (second - largest).exp()) / total
        return TokenScores(
            gap,
            rank,
            surprisal,
            kl.clamp_min(0),
            entropy.clamp_min(0),
            *_of_targets(shifted, total.log(), self.targets_N[rows]),
            tokens[:, : self.num_top],
        )


def _of_targets(logits_NV: Tensor, total_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and rank of targets, of logits whose exponentials' log-sum is given."""
    known = (targets_N >= 0) & (targets_N < logits_NV.shape[-1])
    if not bool(known.any()):
        return torch.full_like(total_N, torch.nan), torch.full_like(targets_N, -1)
    own_N1 = logits_NV.gather(1, targets_N.where(known, 0)[:, None])
    rank = 1 + (logits_NV > own_N1).sum(-1)
    return torch.where(known, total_N - own_N1[:, 0], torch.nan), torch.where(known, rank, -1)
