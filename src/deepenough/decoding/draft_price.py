"""How far to draft: as far as the expected tokens a second rise, which may be not at all.

A pass over `k` drafts of each of B sequences takes `t(k)` seconds, and is expected to give

    E(k) = sum over sequences of (1 + q_1 + q_1 q_2 + ... + q_1 q_2 ... q_k)

tokens, where `q_i` is the probability that draft `i` is accepted if those before it were. Over a
whole generation the most tokens a second, `r`, come of passes of the length (Dinkelbach, 1967)

    k* = argmax over k of  E(k) - r t(k)

where a row of the pass pays if its chance of a token is above what its time gives elsewhere. All of
this is measured as the text is written:

- `t(k)`: the median of the last passes over as many rows. What was not run `FIRST` times is
  not known: it is taken to be on the line through the two below, or as cheap as the one, and so it
  is tried, one length after the other. Now and then a draft is verified where none seems to pay, or
  left out where all do, to see whether that has changed.
  Times are divided by how slow the machine is at the moment.
- `r`: tokens over seconds of the latest passes, and at least that of passes without drafts.
- `q_i`: the drafter's own probability, corrected by how often drafts of that probability at that
  place of a draft were right (`DraftRecord`). What was right is known of every draft once the text
  has been written, whether it was verified or not.

A drafter that takes time is asked for as many tokens as pay at their mean acceptance, by the same
rule with its own seconds a token added to `t`; at 0 it is not asked, but for now and then.
Greedy tokens, and sampled ones from a seed, do not depend on drafts and so not on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepenough.decoding.drafters import Proposal
    from deepenough.decoding.engine import Engine
    from deepenough.decoding.request import SequenceState

#: Times that are kept of each number of rows, and how many there must be to be believed.
KEPT, FIRST = 8, 3
#: Passes after which what does not pay is tried again, and drafts of a drafter that is always asked
#: at first.
PROBE, ASKED_FIRST = 64, 8
#: A drafter that takes a smaller share of a pass than this is always asked.
CHEAP = 0.01
#: Drafts that a drafter's own probability counts for, and what is left of a count after each new.
PRIOR, MEMORY = 4.0, 0.98
#: Intervals of probability, and places of a draft, that are told apart.
BINS, PLACES = 8, 4


def best_length(expected: Sequence[float], seconds: Sequence[float], rate: float) -> int:
    """Return `argmax_k expected[k] - rate * seconds[k]`, the shortest of equal ones."""
    values = [tokens - rate * time for tokens, time in zip(expected, seconds, strict=True)]
    return values.index(max(values))


class PassTimes:
    """What passes over so many rows took lately, from layer `first` on.

    Seconds are those of a machine as fast as at first. `level` is how much slower it is at the
    moment, by passes of the first kind that was known: where others work on the machine, all passes
    slow down alike, and what was measured before stays comparable.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], deque[float]] = {}
        self.level = 1.0

    def add(self, rows: int, first: int, seconds: float) -> float:
        """Take notice of a pass; return its seconds at the first speed."""
        seconds = max(seconds, 1e-9) / self.level
        kept = self.kept.setdefault((first, rows), deque(maxlen=KEPT))
        if len(kept) == KEPT and kept is next(iter(self.kept.values())):
            self.level *= min(max(seconds / median(kept), 0.25), 4.0) ** 0.5
        else:
            kept.append(seconds)
        return seconds

    def is_known(self, rows: int, first: int = 0) -> bool:
        """Return whether so many rows were run often enough."""
        return len(self.kept.get((first, rows), ())) >= FIRST

    def seconds(self, rows: int, first: int = 0) -> float:
        """Return what a pass over so many rows takes, 0 if nothing is known."""
        if self.is_known(rows, first):
            return median(self.kept[first, rows])
        known = [
            n for begin, n in self.kept if begin == first and n < rows and self.is_known(n, first)
        ]
        below = sorted(known)[-2:]
        times = [median(self.kept[first, each]) for each in below]
        if len(below) < 2:
            return times[0] if times else 0.0
        slope = max(0.0, (times[1] - times[0]) / (below[1] - below[0]))
        return times[1] + slope * (rows - below[1])


class DraftRecord:
    """How often a drafter was right, and what it takes; the latest counts most."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.cells: dict[tuple[int, int], tuple[float, float]] = {}
        """By place in the draft and interval of probability: drafts that were right, and all."""
        self.reach = [0.0] * num_draft_tokens
        """By place: how often all drafts up to it were right."""
        self.times: deque[float] = deque(maxlen=KEPT)
        """Seconds a token that was asked for."""
        self.asked = self.skipped = 0
        self._open: list[tuple[SequenceState, int, list[int], list[float]]] = []

    def accepted(self, place: int, prob: float) -> float:
        """Return the probability that a draft at a place is right if those before it are."""
        right, seen = self.cells.get(_cell(place, prob), (0.0, 0.0))
        return (right + PRIOR * prob) / (seen + PRIOR)

    def add(
        self, rows: Sequence[SequenceState], proposal: Proposal, wanted: int, seconds: float
    ) -> None:
        """Remember drafts until the text is written, and how long they took."""
        self.asked, self.skipped = self.asked + 1, 0
        self.times.append(seconds / wanted)
        for row, tokens, probs in zip(rows, proposal.tokens, proposal.chances, strict=True):
            self._open.append((row, len(row.tokens), tokens, probs))

    def judge(self) -> None:
        """Compare drafts with what was written in their places."""
        still_open = []
        for row, start, tokens, probs in self._open:
            pairs = zip(row.tokens[start : start + len(tokens)], tokens, strict=False)
            right = next((n for n, (own, draft) in enumerate(pairs) if own != draft), None)
            if right is None and len(row.tokens) < start + len(tokens):
                if not row.done:
                    still_open.append((row, start, tokens, probs))
                continue
            known = len(tokens) if right is None else right
            for place, prob in enumerate(probs[: known + 1]):
                cell = _cell(place, prob)
                was, seen = self.cells.get(cell, (0.0, 0.0))
                self.cells[cell] = MEMORY * was + (place < known), MEMORY * seen + 1.0
            share = max(1.0 - MEMORY, 1.0 / (self.asked or 1))
            for place, was in enumerate(self.reach):
                self.reach[place] = was + share * ((place < known) - was)
        self._open = still_open


def _cell(place: int, prob: float) -> tuple[int, int]:
    return min(place, PLACES - 1), min(int(prob * BINS), BINS - 1)


class DraftPrice:
    """Chooses how far to draft, by what passes of an engine took and how drafts fared."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._alike, self._drafts = 0, False

    def _rate(self, times: PassTimes, batch: int) -> float:
        """Return tokens a second, of late or without drafts, whichever is more."""
        plain = times.seconds(batch)
        without = batch / plain if plain else 0.0
        return max(without, self._tokens / self._seconds if self._seconds else 0.0)

    def wanted(self, record: DraftRecord, engine: Engine, batch: int) -> int:
        """Return for how many tokens a drafter is asked, 0 for not at all."""
        times, most = engine.pass_times, len(record.reach)
        if not times.is_known(batch):
            return 0
        record.judge()
        own = median(record.times) if record.times else 0.0
        record.skipped += 1
        if record.asked < ASKED_FIRST or record.skipped > PROBE:
            return most
        if own * most < CHEAP * times.seconds(batch):
            return most
        expected, seconds = [float(batch)], [times.seconds(batch)]
        for place, reach in enumerate(record.reach):
            expected.append(expected[-1] + batch * reach)
            rows = times.seconds(batch * (place + 2))
            seconds.append(rows + own * (place + 1))
        return best_length(expected, seconds, self._rate(times, batch))

    def length(self, proposal: Proposal, engine: Engine, batch: int) -> int:
        """Return how many of the drafts of each sequence to verify."""
        times, longest = engine.pass_times, max(map(len, proposal.tokens))
        if not longest:
            return 0
        expected, alive = [float(batch)], [1.0] * batch
        for place in range(longest):
            for row, probs in enumerate(proposal.chances):
                record = proposal.sources[row].record
                short = place >= len(probs)
                alive[row] *= 0.0 if short else record.accepted(place, probs[place])
            expected.append(expected[-1] + sum(alive))
        first, seconds = proposal.layer, []
        for place in range(longest + 1):
            seconds.append(times.seconds(batch * (place + 1), first))
            if not times.is_known(batch * (place + 1), first):
                break
        length = best_length(expected[: len(seconds)], seconds, self._rate(times, batch))
        self._alike = self._alike + 1 if (length > 0) == self._drafts else 0
        if self._alike > PROBE:  # the other kind of pass is tried
            length, self._alike = int(length == 0), 0
        else:
            self._drafts = length > 0
        return length

    def add(
        self, engine: Engine, rows: int, first: int, times: tuple[float, float], new: int
    ) -> None:
        """Take notice of a pass: rows, first layer, seconds of drafts and rest, new tokens."""
        drafting = times[0] / engine.pass_times.level
        self._tokens = MEMORY * self._tokens + new
        spent = drafting + engine.pass_times.add(rows, first, times[1])
        self._seconds = MEMORY * self._seconds + spent
