"""When a pondering model halts, as a distribution over its passes (PonderNet, arXiv 2107.05407).

After pass `n` of `N` the model halts with probability `lambda_n`, given that it got so far:

    p_n = lambda_n * prod_{j<n} (1 - lambda_j)        n < N
    p_N = prod_{j<N} (1 - lambda_j)                   the last pass takes what is left

so that `sum_n p_n = 1` and `lambda_N` plays no part. Everything is computed from the logits of
`lambda` in log space: probabilities that underflow keep exact logarithms and gradients.

The prior is the geometric distribution of a process cut off at `N` in the same way: its last pass
takes the remainder too, rather than all passes being scaled up. A model with `lambda_n` equal to
the prior's at every pass then has a divergence of exactly 0.

The functions ending in `_ref` are the equations as plain loops over one example.

Shapes: B examples, N passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepenough.errors import UserError


def log_survival(halt_logits_BN: Tensor) -> Tensor:
    """`log prod_{j<=n} (1 - lambda_j)`: the model goes on after pass `n`."""
    return F.logsigmoid(-halt_logits_BN).cumsum(-1)


def log_halting(halt_logits_BN: Tensor, num_passes: int) -> Tensor:
    """`log p_n`, `[B, N]`, from the logits of `lambda_1 ... lambda_(N-1)`; later ones are unused.

    With fewer logits than that the passes beyond them cannot be told, which is an error.
    """
    logits = halt_logits_BN[..., : num_passes - 1]
    if logits.shape[-1] != num_passes - 1:
        raise ValueError(f"{num_passes} passes need {num_passes - 1} halting logits")
    reached = F.pad(log_survival(logits), (1, 0))  # the first pass is reached with certainty
    halts = F.pad(F.logsigmoid(logits), (0, 1))  # the last pass halts with certainty
    return reached + halts


def log_geometric(target: float, num_passes: int, like: Tensor | None = None) -> Tensor:
    """`log` of the geometric prior `[N]` with halting probability `target`, cut off at `N`."""
    check_target(target)
    device, dtype = (None, torch.float32) if like is None else (like.device, like.dtype)
    steps = torch.arange(num_passes, device=device, dtype=dtype)
    prior = steps * math.log1p(-target)
    prior[:-1] += math.log(target)
    return prior


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`KL(p || q) = sum_n p_n (log p_n - log q_n)`, one number an example.

    In this direction, the model's distribution first, `p` is kept from where the prior `q` has
    little mass, and pays nothing for passes it never uses.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def expected_steps(log_p: Tensor) -> Tensor:
    """`sum_n n p_n`: how many passes are made on average when halting is sampled."""
    steps = torch.arange(1, log_p.shape[-1] + 1, device=log_p.device, dtype=log_p.dtype)
    return (log_p.exp() * steps).sum(-1)


def check_target(target: float) -> None:
    if not 0.0 < target < 1.0:
        raise UserError(
            f"The halting target must lie between 0 and 1, both excluded: got {target}."
        )


# -- the equations, one example at a time -----------------------------------------------------


def halting_ref(lambdas: Sequence[float]) -> list[float]:
    """`p_n` of one example; the last `lambda` is not used."""
    result, left = [], 1.0
    for halt in lambdas[:-1]:
        result.append(left * halt)
        left *= 1.0 - halt
    return [*result, left]


def geometric_ref(target: float, num_passes: int) -> list[float]:
    return halting_ref([target] * num_passes)


def kl_ref(p: Sequence[float], q: Sequence[float]) -> float:
    """`KL(p || q)`, with `0 log 0 = 0`."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def expected_steps_ref(p: Sequence[float]) -> float:
    return sum(n * mass for n, mass in enumerate(p, start=1))
