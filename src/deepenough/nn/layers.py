"""Layers that several models share: dropout that is fast on a CPU, and ACT's halting.

torch's dropout spends its time in the generator (0.87 ms for 131k elements, of which the
multiplication is 0.01 ms). One 64-bit draw here serves four elements, which is four times faster;
the probability is rounded to a multiple of 2^-16. Other devices use torch's own.

Adaptive Computation Time (ACT, Graves, arXiv 1603.08983) is the baseline that PonderNet replaced.
After pass `n` a halting unit gives `h_n` in (0, 1). The passes are made until their sum reaches
`1 - epsilon`; the last of them, `N(x)`, gets what is left of 1 instead of its own (eq. 5 to 8):

    N(x) = min{n : sum_{j<=n} h_j >= 1 - epsilon}      and never more than the passes there are
    R(x) = 1 - sum_{n<N(x)} h_n
    w_n  = h_n for n < N(x),  R(x) for n = N(x),  0 beyond

The answer is the mean of all passes' outputs weighted by `w`, not one pass's own, and the loss has
the cost `tau * (N(x) + R(x))` added, whose gradient goes through `R` alone because `N` has none.

Shapes: B examples, N passes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16
EPSILON = 0.01


class Dropout(nn.Dropout):
    """Dropout with a fast generator on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements dropped and the others scaled up, in training mode only."""
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        return x * dropout_mask(x.shape, self.p, x.dtype)


def dropout_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros, with the given probability, and `1 / (1 - probability)`."""
    num_elements = shape.numel()
    words = torch.empty(-(-num_elements // 4), dtype=torch.int64).random_(-(1 << 63), None)
    bits = words.view(torch.int16)[:num_elements].view(shape)
    threshold = min(round(probability * _LEVELS), _LEVELS - 1)
    # The comparison writes numbers at once: turning booleans into them takes four times as long.
    mask = torch.empty(shape, dtype=dtype)
    torch.ge(bits, threshold - _LEVELS // 2, out=mask)
    return mask.mul_(_LEVELS / (_LEVELS - threshold))


class ActHalting(NamedTuple):
    """The halting decisions of a batch of examples."""

    weights: Tensor
    """[B, N], `w_n`; each row sums to 1."""
    passes: Tensor
    """[B], `N(x)`."""
    cost: Tensor
    """[B], `N(x) + R(x)`."""


def act_halting(halt_logits_BN: Tensor) -> ActHalting:
    """Return weights, number of passes and cost of each example from the logits of `h_n`."""
    halts = halt_logits_BN.sigmoid()
    num_passes = halts.shape[-1]
    total = halts.cumsum(-1)
    passes = (total < 1.0 - EPSILON).sum(-1).clamp(max=num_passes - 1) + 1
    position = torch.arange(1, num_passes + 1, device=halts.device)
    before = position < passes[:, None]
    last = position == passes[:, None]
    remainder = 1.0 - (halts * before).sum(-1)
    weights = halts * before + remainder[:, None] * last
    return ActHalting(weights, passes, passes + remainder)
