"""The parts of a PAR model: blocks, the choice between their branches, and what they cost.

A block is attention, dense, identity, or all three weighted while the search is open. Each branch
is residual with the norm first: `x + F(norm(x))`. Since the weights of a block sum to one,
`w_a (x + A) + w_d (x + D) + w_i x` is `x + w_a A + w_d D`, and both branches read one norm. That
norm has no scale or shift of its own, because the linear maps behind it hold them; so memories can
be kept normalised, which is done once instead of at every reading.

The choice is a Gumbel-softmax (arXiv 1611.01144, eq. 2) over the branches of every block:

    w = softmax((log pi + g) / tau),   pi = softmax(alpha),   g ~ Gumbel(0, 1)

`pi` is what is shown to people; `tau` is annealed from outside or learned. Every stream of the
batch has its own draw, which lowers the variance of alpha's gradient, and evaluation has none:
`w = softmax(log pi / tau)`. Straight-through samples are one branch in the forward pass, the
likeliest one in evaluation, with the gradient of the soft weights.

FLOPs count a multiply-add as two, matrix products only. They are the counts of torch's own
`FlopCounterMode` in closed form (a test holds them equal), so a trace costs nothing to write.

Shapes: B streams, S new tokens, K keys, M memory, D width, N blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from deepenough.nn.layers import Dropout
from deepenough.nn.relative_attention import (
    RelativeAttention,
    distance_codes,
    projects_queries,
    visible_keys,
)
from deepenough.par.config import ATTENTION, BRANCHES, DENSE, IDENTITY, OPEN

if TYPE_CHECKING:
    from deepenough.par.modeling import ParConfig


# -- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelativeContext:
    """What all attention branches of one forward pass share."""

    codes: Tensor
    """Distance codes from one beyond the farthest to 0, or to 1 - S to look both ways."""
    mask: Tensor
    """Added to the logits: -inf where a key must not be seen. `[S, K]`, or `[B, 1, S, K]`."""


@lru_cache(maxsize=64)  # a stream of text meets two or three shapes, generation uncached many
def relative_context(
    num_new: int,
    num_keys: int,
    window: int | None,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RelativeContext:
    """Return the context of `num_new` tokens that see at most `window` of `num_keys` keys.

    Without a window they see all of them, those ahead too.
    """
    num_ahead = num_new - 1 if window is None else 0
    codes = distance_codes(num_keys + 1 + num_ahead, width, first=-num_ahead).flip(0)
    visible = visible_keys(num_new, num_keys, window)
    mask = torch.zeros(num_new, num_keys).masked_fill(~visible, -torch.inf)
    return RelativeContext(codes.to(device, dtype), mask.to(device, dtype))


def hide_padding(context: RelativeContext, attention_mask: Tensor | None) -> RelativeContext:
    """Return the context with padding hidden; `attention_mask`, `[B, *]`, is 0 there."""
    if attention_mask is None or bool(attention_mask.all()):
        return context
    # The newest keys are the last ones. Memory, which the mask does not know of, is all seen.
    num_unknown = context.mask.shape[-1] - attention_mask.shape[1]
    seen = F.pad(attention_mask, (num_unknown, 0), value=1)
    # The most negative number, not -inf: a row of padding alone must not become NaN.
    lowest = torch.finfo(context.mask.dtype).min
    mask = context.mask.masked_fill(seen[:, None, None] == 0, lowest).clamp(min=lowest)
    return RelativeContext(context.codes, mask)


class Dense(nn.Module):
    """Two linear maps with a ReLU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of every token, in the shape of `x`."""
        # Rows in two dimensions: a linear map of more returns a view of its result, and changing
        # that in place would make autograd copy it several times over.
        inner = self.up(x.flatten(0, -2)).relu_()
        return self.down(inner).view_as(x)


class ParBlock(nn.Module):
    """One block of the given kind: a letter of the pattern."""

    def __init__(self, config: ParConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = self.dense = None
        if kind in (ATTENTION, OPEN):
            self.attention = RelativeAttention(config.d_model, config.num_heads)
        if kind in (DENSE, OPEN):
            self.dense = Dense(config.d_model, config.d_ff)
        self.dropout = Dropout(config.dropout)

    @property
    def attends(self) -> bool:
        """Whether the block has an attention branch, and so a memory."""
        return self.kind in (ATTENTION, OPEN)

    def forward(
        self,
        hidden_BSD: Tensor,
        context: RelativeContext,
        memory_BMD: Tensor | None = None,
        cache: Cache | None = None,
        cache_index: int = 0,
        weights_B3: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return new hidden states, and the normalised old ones from which memory is made.

        Earlier tokens are seen by their normalised states, `memory_BMD`, or by their keys and
        values in layer `cache_index` of a cache. `weights_B3` are of an open block's branches.
        """
        if self.kind == IDENTITY:
            return hidden_BSD, hidden_BSD
        normed = F.layer_norm(hidden_BSD, hidden_BSD.shape[-1:])
        if self.attention is not None:
            seen = normed if memory_BMD is None else torch.cat([memory_BMD, normed], 1)
            key, value = self.attention.keys_values(seen)
            if cache is not None:
                # Caches differ in how much they keep; what lies beyond the window is cut off.
                num_keys = context.mask.shape[-1]
                key, value = (x[:, :, -num_keys:] for x in cache.update(key, value, cache_index))
            mixed = self.attention(normed, key, value, context.codes, context.mask)
            hidden_BSD = self._add(hidden_BSD, mixed, weights_B3, 0)
        if self.dense is not None:
            hidden_BSD = self._add(hidden_BSD, self.dense(normed), weights_B3, 1)
        return hidden_BSD, normed

    def _add(self, hidden: Tensor, update: Tensor, weights: Tensor | None, branch: int) -> Tensor:
        update = self.dropout(update)
        if weights is None:
            return hidden + update
        return torch.addcmul(hidden, update, weights[:, branch, None, None])


# -- the choice between branches -------------------------------------------------------------------


def gumbel_noise(
    num_blocks: int, num_streams: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return `g` for every block, stream and branch, drawn on the CPU so that devices agree."""
    shape = (num_blocks, num_streams, len(BRANCHES))
    return -torch.empty(shape).exponential_(generator=generator).log()


class BranchChoice(nn.Module):
    """The scores `alpha` of a SuperNet's branches, and the weights drawn from them.

    A block that the pattern gives has no choice: its probability of that branch is 1.
    """

    tau: Tensor

    def __init__(self, pattern: str, straight_through: bool, learn_tau: bool) -> None:
        super().__init__()
        self.pattern = pattern
        self.straight_through = straight_through
        self.alpha = nn.Parameter(torch.zeros(len(pattern), len(BRANCHES)))
        self.log_tau = nn.Parameter(torch.zeros(())) if learn_tau else None
        self.register_buffer("tau", torch.ones(()))

    @property
    def temperature(self) -> Tensor:
        """The temperature, given or learned."""
        return self.tau if self.log_tau is None else self.log_tau.exp()

    @torch.no_grad()
    def set_tau(self, tau: float) -> None:
        """Set the temperature, or where a learned one goes on from."""
        self.tau.fill_(tau)
        if self.log_tau is not None:
            self.log_tau.fill_(math.log(tau))

    def scores(self) -> Tensor:
        """Return `alpha`, `[N, 3]`, with those of given blocks far apart and without gradient."""
        given = [[30.0 * (kind == branch) for branch in BRANCHES] for kind in self.pattern]
        is_open = torch.tensor([[kind == OPEN] for kind in self.pattern], device=self.alpha.device)
        return torch.where(is_open, self.alpha, self.alpha.new_tensor(given))

    def probabilities(self) -> Tensor:
        """Return `pi`, `[N, 3]`."""
        return self.scores().softmax(-1)

    def forward(self, num_streams: int, noise: Tensor | None) -> Tensor:
        """Return the weights of the branches, `[N, B, 3]`; `noise` replaces an own draw."""
        logits = self.scores().log_softmax(-1)[:, None, :]
        if self.training:
            if noise is None:
                noise = gumbel_noise(len(self.alpha), num_streams)
            logits = logits + noise.to(logits)
        weights = (logits / self.temperature).softmax(-1)
        weights = weights.expand(-1, num_streams, -1)
        if self.straight_through:
            hard = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
            weights = hard + (weights - weights.detach())
        return weights


# -- FLOPs -----------------------------------------------------------------------------------------


def branch_flops(
    config: ParConfig, branch: str, streams: int, new: int, keys: int, projected: int | None = None
) -> int:
    """Return the FLOPs of a block in one forward pass over `new` tokens that look at `keys`.

    `projected` counts the positions whose keys and values are computed: all of them with memory
    (the default), the new ones alone with a cache.
    """
    d = config.d_model
    if branch == IDENTITY:
        return 0
    if branch == DENSE:
        return 2 * streams * new * 2 * d * config.d_ff
    if branch == OPEN:
        both = (ATTENTION, DENSE)
        return sum(branch_flops(config, kind, streams, new, keys, projected) for kind in both)
    projected = keys if projected is None else projected
    maps = 2 * streams * (new * 2 * d * d + projected * 2 * d * d)
    queries, distances = streams * new, keys + (new if config.bidirectional else 1)
    if projects_queries(queries, d // config.num_heads):
        positions = 2 * queries * d * d + 2 * config.num_heads * queries * distances * d
    else:
        positions = 2 * distances * d * d + 2 * queries * distances * d
    attention = 2 * streams * new * keys * 2 * d
    return maps + positions + attention


def head_flops(config: ParConfig, num_tokens: int, targets: Tensor | None = None) -> Tensor:
    """Return the FLOPs of the output layer for each token.

    With targets nothing is computed for those to be ignored (-100), and the adaptive softmax
    computes only the clusters that the others fall into.
    """
    d, cutoffs = config.d_model, config.cutoffs
    head = 2.0 * d * (cutoffs[0] + len(cutoffs) if cutoffs else config.vocab_size)
    cost = torch.full((num_tokens,), head, dtype=torch.float64)
    flat = None if targets is None else targets.flatten().cpu()
    bounds = pairwise([*cutoffs, config.vocab_size])
    for cluster, (low, high) in enumerate(bounds, start=1):
        inner = int(d // config.div_value**cluster)
        tail = 2.0 * inner * (d + high - low)
        cost += tail if flat is None else tail * ((flat >= low) & (flat < high))
    return cost if flat is None else cost * (flat != -100)
