"""A threshold with a guarantee: Learn then Test (arXiv 2110.01052), as in CALM (2207.07061).

A threshold has a risk, the expected loss of a text decoded with it: how often its tokens are not
those of the full model, or any other loss between 0 and 1. From `n` texts with mean loss `r`, the
hypothesis "the risk is above `alpha`" has the Hoeffding-Bentkus p-value

    p = min( exp(-n KL(min(r, alpha) || alpha)),  e P(Bin(n, alpha) <= ceil(n r)) )

where `KL` is between Bernoulli distributions. Thresholds are tested from the most careful on, in an
order fixed beforehand, and the testing stops at the first that cannot be rejected. Then, whatever
the losses are, all that were rejected before it have a risk of at most `alpha`, with a probability
of at least `1 - delta` over the texts; the last of them is the fastest, and is taken.

The texts must be drawn independently: their tokens are not, so a text counts once, with its mean.

That p-value treats a text that is wrong in 4 of 100 tokens like one in 25 texts that is all wrong.
Texts of about the same loss say more, and `betting` (arXiv 2010.09686, as in 2101.02703) hears it:
a capital that grows if the losses stay below `alpha`,

    K_i = prod_j (1 - nu_j (L_j - alpha)),   nu_j = min(1, sqrt(2 log(1 / delta) / (n s_(j-1)^2)))

where the variance `s^2` is of the losses before. If the risk is above `alpha` no bet wins on
average, so `1 / max K_i` is a p-value as well. It needs the texts in an order that says nothing of
their losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from deepenough.errors import UserError

BOUNDS = ("hoeffding-bentkus", "betting")


@dataclass(frozen=True)
class Guarantee:
    """What a calibration found."""

    threshold: float | None
    """The fastest threshold that holds; None if none does."""
    max_risk: float
    confidence: float
    texts: int
    risks: tuple[float, ...]
    """Mean losses of the thresholds, the most careful first."""
    p_values: tuple[float, ...]
    """Of those that were tested."""


def bernoulli_kl(a: float, b: float) -> float:
    """`KL(a || b)`: a log(a / b) + (1 - a) log((1 - a) / (1 - b)), with 0 log 0 = 0."""
    first = a * math.log(a / b) if a > 0 else 0.0
    second = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return first + second


def binomial_cdf(successes: int, trials: int, chance: float) -> float:
    """`P(Bin(trials, chance) <= successes)`, summed from logarithms."""
    if successes < 0:
        return 0.0
    if successes >= trials:
        return 1.0
    places = range(successes + 1)
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(chance)
        + (trials - k) * math.log1p(-chance)
        for k in places
    ]
    highest = max(logs)
    return min(1.0, math.exp(highest) * math.fsum(math.exp(each - highest) for each in logs))


def p_value(mean_loss: float, texts: int, max_risk: float) -> float:
    """Hoeffding-Bentkus p-value of "the risk is above `max_risk`"."""
    hoeffding = math.exp(-texts * bernoulli_kl(min(mean_loss, max_risk), max_risk))
    # A mean of n numbers times n is not n times the mean: rounding must not add a success.
    successes = math.ceil(round(texts * mean_loss, 9))
    bentkus = math.e * binomial_cdf(successes, texts, max_risk)
    return min(1.0, hoeffding, bentkus)


def betting_p_value(losses_N: Tensor, max_risk: float, delta: float = 0.05) -> float:
    """The same from the losses one by one, as the winnings of a bet against them."""
    losses_N = losses_N.double()
    count = len(losses_N)
    seen_N = torch.arange(2, count + 2, dtype=torch.float64)
    mean_N = (0.5 + losses_N.cumsum(0)) / seen_N
    variance_N = (0.25 + (losses_N - mean_N).square().cumsum(0)) / seen_N
    # A bet may know only what came before it.
    before_N = torch.cat([torch.tensor([0.25], dtype=torch.float64), variance_N[:-1]])
    stake_N = (2 * math.log(1 / delta) / (count * before_N)).sqrt().clamp_max(1.0)
    capital_N = (1 - stake_N * (losses_N - max_risk)).log().cumsum(0)
    return min(1.0, math.exp(-float(capital_N.max())))


def risk_p_value(losses_N: Tensor, max_risk: float, confidence: float, bound: str) -> float:
    """By one of the two bounds."""
    if bound == "betting":
        return betting_p_value(losses_N, max_risk, 1 - confidence)
    return p_value(float(losses_N.double().mean()), len(losses_N), max_risk)


@cache
def texts_needed(max_risk: float, confidence: float, bound: str = "hoeffding-bentkus") -> int:
    """The fewest texts with which a threshold that never errs could be accepted.

    Without any loss the first p-value is `(1 - max_risk) ** texts`; a bet needs a little longer.
    """
    texts = math.ceil(math.log(1 - confidence) / math.log1p(-max_risk))
    while bound == "betting":
        nothing = torch.zeros(texts, dtype=torch.float64)
        if betting_p_value(nothing, max_risk, 1 - confidence) <= 1 - confidence:
            break
        texts += 1
    return texts


def calibrate(
    losses_NT: Tensor,
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
    bound: str = "hoeffding-bentkus",
) -> Guarantee:
    """The last of `thresholds`, the most careful first, whose risk is at most `max_risk`.

    `losses_NT` has a line for every text and a column for every threshold, of losses in [0, 1].
    """
    if losses_NT.ndim != 2 or losses_NT.shape[1] != len(thresholds) or not len(thresholds):
        raise UserError(
            f"Losses need a line for each text and a column for each of {len(thresholds)} "
            f"thresholds: got the shape {tuple(losses_NT.shape)}."
        )
    columns = dict(zip(thresholds, losses_NT.unbind(1), strict=True))
    found = accept_in_order(columns.__getitem__, thresholds, max_risk, confidence, bound)
    return replace(found, risks=tuple(losses_NT.double().mean(0).tolist()))


def accept_in_order(
    losses_of: Callable[[float], Tensor],
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
    bound: str = "hoeffding-bentkus",
) -> Guarantee:
    """The same for losses `[N]` that are measured threshold by threshold, until one fails."""
    check_asked(max_risk, confidence, bound)
    risks: list[float] = []
    p_values: list[float] = []
    chosen, texts = None, 0
    for threshold in thresholds:
        losses_N = losses_of(threshold)
        _check(losses_N, max_risk, confidence, bound)
        texts = len(losses_N)
        risks.append(float(losses_N.double().mean()))
        p_values.append(risk_p_value(losses_N, max_risk, confidence, bound))
        if p_values[-1] > 1 - confidence:
            break
        chosen = threshold
    return Guarantee(chosen, max_risk, confidence, texts, tuple(risks), tuple(p_values))


def check_asked(max_risk: float, confidence: float, bound: str) -> None:
    """Refuse what cannot be guaranteed."""
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} must be between 0 and 1: got {value}.")
    if bound not in BOUNDS:
        raise UserError(f"A risk is bounded by {' or '.join(BOUNDS)}, not by {bound!r}.")


def check_enough(texts: int, max_risk: float, confidence: float, bound: str) -> None:
    """Refuse texts so few that nothing could be accepted."""
    needed = texts_needed(max_risk, confidence, bound)
    if texts < needed:
        raise UserError(
            f"{texts} texts are too few to be sure: a risk of {max_risk} with confidence "
            f"{confidence} needs at least {needed}, and more if there are losses at all."
        )


def _check(losses_N: Tensor, max_risk: float, confidence: float, bound: str) -> None:
    if not bool(((losses_N >= 0) & (losses_N <= 1)).all()):
        raise UserError("Losses must be between 0 and 1: scale them.")
    check_enough(len(losses_N), max_risk, confidence, bound)


def coverage(
    losses_NT: Tensor,
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
    splits: int = 100,
    seed: int = 0,
    bound: str = "hoeffding-bentkus",
) -> float:
    """Of random halves for calibrating and testing, the share whose test risk is too high.

    Where no threshold holds the full model is used, which never errs.
    """
    generator = torch.Generator().manual_seed(seed)
    exceeded = 0
    half = len(losses_NT) // 2
    for _ in range(splits):
        order = torch.randperm(len(losses_NT), generator=generator)
        found = calibrate(losses_NT[order[:half]], thresholds, max_risk, confidence, bound)
        if found.threshold is not None:
            column = list(thresholds).index(found.threshold)
            exceeded += float(losses_NT[order[half:], column].double().mean()) > max_risk
    return exceeded / splits
