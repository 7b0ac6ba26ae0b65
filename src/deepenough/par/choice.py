"""The choice between branches: a Gumbel-softmax over {attention, dense, identity} for every block.

    w = softmax((log pi + g) / tau),   pi = softmax(alpha),   g ~ Gumbel(0, 1)

(arXiv 1611.01144, eq. 2.) `pi` is what is shown to people; `tau` is annealed from outside or
learned. Every lane of the batch has its own draw, which lowers the variance of alpha's gradient,
and evaluation has none: `w = softmax(log pi / tau)`. Straight-through samples are one branch in the
forward pass, the likeliest one in evaluation, with the gradient of the soft weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deepenough.par.pattern import BRANCHES


def gumbel_noise(
    num_blocks: int, num_lanes: int, generator: torch.Generator | None = None
) -> Tensor:
    """`g` for every block, lane and branch; drawn on the CPU so that devices agree."""
    shape = (num_blocks, num_lanes, len(BRANCHES))
    return -torch.empty(shape).exponential_(generator=generator).log()


class BranchChoice(nn.Module):
    tau: Tensor
    decided: Tensor

    def __init__(self, num_blocks: int, straight_through: bool, learn_tau: bool) -> None:
        super().__init__()
        self.straight_through = straight_through
        self.alpha = nn.Parameter(torch.zeros(num_blocks, len(BRANCHES)))
        self.log_tau = nn.Parameter(torch.zeros(())) if learn_tau else None
        self.register_buffer("tau", torch.ones(()))
        # Index of the branch of a block that has been closed, -1 while it is open.
        self.register_buffer("decided", torch.full((num_blocks,), -1))

    @property
    def temperature(self) -> Tensor:
        return self.tau if self.log_tau is None else self.log_tau.exp()

    @torch.no_grad()
    def set_tau(self, tau: float) -> None:
        """The temperature from now on, or where a learned one goes on from."""
        self.tau.fill_(tau)
        if self.log_tau is not None:
            self.log_tau.fill_(math.log(tau))

    def probabilities(self) -> Tensor:
        """`pi`, `[N, 3]`; a closed block has no gradient, for nothing is left to choose."""
        pi = self.alpha.softmax(-1)
        return torch.where((self.decided >= 0)[:, None], pi.detach(), pi)

    def forward(self, num_lanes: int, noise: Tensor | None) -> Tensor:
        """Weights of the branches, `[N, B, 3]`."""
        logits = self.alpha.log_softmax(-1)[:, None, :]
        if self.training:
            if noise is None:
                noise = gumbel_noise(len(self.alpha), num_lanes)
            logits = logits + noise.to(logits)
        weights = (logits / self.temperature).softmax(-1)
        weights = weights.expand(-1, num_lanes, -1)
        if self.straight_through:
            hard = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
            weights = hard + (weights - weights.detach())
        return weights


def entropy(probabilities: Tensor) -> float:
    """How undecided the search is: mean entropy of the rows over its maximum, 1 to 0."""
    terms = torch.special.entr(probabilities.double()).sum(-1) / math.log(probabilities.shape[-1])
    return float(terms.mean()) if len(terms) else 0.0
