"""From probabilities to a pattern: the likeliest one, within a budget if one is given.

    maximise  sum_b log pi_b(kind_b)
    subject to  spend * budget * cost(interleaved) <= cost(pattern) <= budget * cost(interleaved)

All blocks have one shape, so a pattern's cost depends only on how many blocks of each kind it has.
That makes the constrained optimum exact and cheap: the best patterns for every pair of counts
(attention, dense) are found block by block, and the best pair that fits the budget is taken.

`spend` asks that the budget be used: attention learns more slowly than dense blocks, so a short
search finds it less likely than it deserves, while *which* blocks it prefers is seen early.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepenough.errors import UserError
from deepenough.par.pattern import ATTENTION, BRANCHES, DENSE, IDENTITY, OPEN, interleaved


@dataclass(frozen=True)
class BlockCosts:
    """Cost of one block of each kind and of everything around the blocks, in one unit."""

    attention: float
    dense: float
    identity: float
    rest: float

    def of(self, pattern: str) -> float:
        """Of a whole forward pass."""
        # By counts, so that patterns with equal counts cost the same to the last bit.
        return self.rest + sum(pattern.count(kind) * self.of_block(kind) for kind in BRANCHES)

    def of_block(self, kind: str) -> float:
        return {ATTENTION: self.attention, DENSE: self.dense, IDENTITY: self.identity}[kind]

    def relative(self, pattern: str) -> float:
        """As a share of the interleaved baseline with as many blocks."""
        return self.of(pattern) / self.of(interleaved(len(pattern)))


def derive(
    probabilities: Sequence[Sequence[float]],
    costs: BlockCosts | None = None,
    budget: float | None = None,
    spend: float = 0.0,
    fixed: str | None = None,
) -> str:
    """The likeliest pattern; with a budget, the likeliest of those that keep (and spend) it.

    `fixed` is the pattern that the search began with: what it leaves no choice stays as it is.
    """
    if budget is not None and costs is None:
        raise ValueError("a budget needs the costs of the blocks")
    num_blocks = len(probabilities)
    best: dict[tuple[int, int], tuple[float, str]] = {(0, 0): (0.0, "")}
    for row, given in zip(probabilities, fixed or OPEN * num_blocks, strict=True):
        score_a, score_d, score_i = (_log(p) for p in row)
        longer: dict[tuple[int, int], tuple[float, str]] = {}
        for (num_a, num_d), (score, pattern) in best.items():
            for counts, gain, kind in (
                ((num_a + 1, num_d), score_a, ATTENTION),
                ((num_a, num_d + 1), score_d, DENSE),
                ((num_a, num_d), score_i, IDENTITY),
            ):
                if given not in (OPEN, kind):
                    continue
                candidate = (score + gain, pattern + kind)
                if counts not in longer or candidate[0] > longer[counts][0]:
                    longer[counts] = candidate
        best = longer
    patterns = [found for counts, found in best.items() if counts != (0, 0)]
    if budget is not None:
        assert costs is not None
        fitting = [found for found in patterns if costs.relative(found[1]) <= budget]
        if not fitting:
            cheapest = min((pattern for _, pattern in patterns), key=costs.relative)
            share = math.ceil(1000 * costs.relative(cheapest)) / 1000
            raise UserError(
                f"No pattern of {num_blocks} blocks costs at most {budget:g} of the interleaved "
                f"baseline: the cheapest, {cheapest}, needs a budget of {share:g}."
            )
        patterns = [found for found in fitting if costs.relative(found[1]) >= spend * budget]
        if not patterns:
            dearest = max((pattern for _, pattern in fitting), key=costs.relative)
            raise UserError(
                f"No pattern of {num_blocks} blocks costs between {spend * budget:.3g} and "
                f"{budget:g} of the interleaved baseline: the dearest within the budget, "
                f"{dearest}, costs {costs.relative(dearest):.3g}; lower spend."
            )
    return max(patterns)[1]


def derive_ref(
    probabilities: Sequence[Sequence[float]], costs: BlockCosts, budget: float, spend: float = 0.0
) -> tuple[str, float] | None:
    """Try all patterns: the likeliest that keeps the budget, and its log-likelihood."""
    found: tuple[str, float] | None = None
    for kinds in itertools.product(range(len(BRANCHES)), repeat=len(probabilities)):
        pattern = "".join(BRANCHES[kind] for kind in kinds)
        score = sum(_log(row[kind]) for row, kind in zip(probabilities, kinds, strict=True))
        some_block = pattern.count(IDENTITY) < len(pattern)
        fits = some_block and spend * budget <= costs.relative(pattern) <= budget
        if fits and (found is None or score > found[1]):
            found = pattern, score
    return found


def _log(probability: float) -> float:
    """Finite for a probability that has underflowed."""
    return math.log(max(probability, 1e-300))
