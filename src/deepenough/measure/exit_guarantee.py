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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepenough.errors import UserError


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


def texts_needed(max_risk: float, confidence: float) -> int:
    """The fewest texts with which a threshold that never errs could be accepted.

    Without any loss the p-value is `(1 - max_risk) ** texts`.
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-max_risk))


def calibrate(
    losses_NT: Tensor,
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
) -> Guarantee:
    """The last of `thresholds`, the most careful first, whose risk is at most `max_risk`.

    `losses_NT` has a line for every text and a column for every threshold, of losses in [0, 1].
    """
    _check(losses_NT, thresholds, max_risk, confidence)
    texts = len(losses_NT)
    risks = tuple(losses_NT.double().mean(0).tolist())
    p_values: list[float] = []
    chosen = None
    for threshold, risk in zip(thresholds, risks, strict=True):
        p_values.append(p_value(risk, texts, max_risk))
        if p_values[-1] > 1 - confidence:
            break
        chosen = threshold
    return Guarantee(chosen, max_risk, confidence, texts, risks, tuple(p_values))


def _check(
    losses_NT: Tensor, thresholds: Sequence[float], max_risk: float, confidence: float
) -> None:
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} must be between 0 and 1: got {value}.")
    if losses_NT.ndim != 2 or losses_NT.shape[1] != len(thresholds) or not len(thresholds):
        raise UserError(
            f"Losses need a line for each text and a column for each of {len(thresholds)} "
            f"thresholds: got the shape {tuple(losses_NT.shape)}."
        )
    if not bool(((losses_NT >= 0) & (losses_NT <= 1)).all()):
        raise UserError("Losses must be between 0 and 1: scale them.")
    needed = texts_needed(max_risk, confidence)
    if len(losses_NT) < needed:
        raise UserError(
            f"{len(losses_NT)} texts are too few to be sure: a risk of {max_risk} with confidence "
            f"{confidence} needs at least {needed}, and more if there are losses at all."
        )


def coverage(
    losses_NT: Tensor,
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
    splits: int = 100,
    seed: int = 0,
) -> float:
    """Of random halves for calibrating and testing, the share whose test risk is too high.

    Where no threshold holds the full model is used, which never errs.
    """
    generator = torch.Generator().manual_seed(seed)
    exceeded = 0
    half = len(losses_NT) // 2
    for _ in range(splits):
        order = torch.randperm(len(losses_NT), generator=generator)
        found = calibrate(losses_NT[order[:half]], thresholds, max_risk, confidence)
        if found.threshold is not None:
            column = list(thresholds).index(found.threshold)
            exceeded += float(losses_NT[order[half:], column].double().mean()) > max_risk
    return exceeded / splits
