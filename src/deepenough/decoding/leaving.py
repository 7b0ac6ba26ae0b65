"""Where tokens may leave, and the test that lets them.

At a layer where exits are checked, a state is taken to the last layer by its shortcut, normed and
projected on the vocabulary, and a policy looks at the probabilities. Where a shortlist of words is
given, the policy first looks at these alone. Only a token that would leave pays for the whole
vocabulary, which it needs anyway to be chosen, and is then asked again: so nothing leaves that
would not leave without the shortlist. (Where a policy counts how long the best word has been the
same, it always looks at all words.) For the policies of confidence the shortlist costs little:
probabilities among fewer words are larger, so what is sure among all words is sure among those of
the shortlist, if the word is one of them.

Shapes: N states, D width, S shortlist, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.decoding.carry import shortlist_head
from deepenough.decoding.engine import Engine
from deepenough.decoding.filling import FILLS, Fill
from deepenough.decoding.policies import ExitPolicy, Look
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts


@dataclass
class EarlyExit:
    """Where tokens may leave, who decides, and what stays behind."""

    shortcuts: Shortcuts
    policy: ExitPolicy
    layers: Sequence[int]
    """Layers after which exits are checked."""
    fill: Fill = "shortcut"
    shortlist: Tensor | None = None
    """Words on which the test is made first; None for all."""

    @property
    def map_mode(self) -> str | None:
        """Maps to the last layer: those whose predictions were trained, where there are such."""
        tuned = self.shortcuts.tuned
        return "tuned" if all(layer in tuned for layer in self.layers) else None

    def check(self, engine: Engine) -> None:
        """Refuse what cannot be done."""
        last = engine.num_layers
        if not self.layers or not all(0 < layer < last for layer in self.layers):
            raise UserError(
                f"Exits are checked after some of the layers 1 to {last - 1}: got "
                f"{list(self.layers)}."
            )
        if self.fill not in FILLS:
            raise UserError(f"The cache is filled by {', '.join(FILLS)}, not by {self.fill!r}.")
        if self.fill == "shortcut" and self.shortcuts.targets != "all":
            raise UserError(
                "Shortcuts to the last layer alone cannot fill the cache: fit them with "
                'targets="all", or fill by copy or deferred.'
            )
        if self.fill == "deferred" and not engine.takes_groups:
            raise UserError(
                f"{type(engine.adapter.model).__name__} is run through its own layers, which take "
                "one token of each row at a time and cannot catch up on several: fill by shortcut "
                "or copy."
            )
        words = self.shortlist
        if words is not None and (words.ndim != 1 or words.dtype != torch.long or len(words) < 2):
            raise UserError("A shortlist is a row of at least two token ids.")


@dataclass
class Streaks:
    """At how many checked layers in a row each unit's best word was the same."""

    word_N: Tensor
    count_N: Tensor

    @classmethod
    def none(cls, units: int, device: torch.device) -> Streaks:
        zeros = torch.zeros(units, dtype=torch.long, device=device)
        return cls(zeros - 1, zeros)

    def see(self, units: Tensor, best: Tensor) -> Tensor:
        """The counts of some units, whose best words are now these."""
        same = self.word_N[units] == best
        counts = torch.where(same, self.count_N[units] + 1, 1)
        self.word_N[units], self.count_N[units] = best, counts
        return counts


@dataclass
class Answer:
    """Who leaves at a layer."""

    leaves_N: Tensor
    logits: Tensor
    """Of those that leave, `[n, V]`."""
    asked_N: Tensor
    """Whose whole vocabulary was looked at."""


class ExitTest:
    """The test at the exits of one engine."""

    def __init__(self, engine: Engine, early: EarlyExit) -> None:
        self.engine, self.early = engine, early
        self.last, self.map_mode = engine.num_layers, early.map_mode
        words, device = early.shortlist, engine.adapter.model.device
        if early.policy.watches_streaks:  # the best of few words stays the same sooner
            words = None
        self.words = None if words is None else shortlist_head(engine.adapter, words.to(device))
        width = engine.adapter.width
        listed = 0.0 if self.words is None else 2.0 * self.words[0].numel()
        self.flops = 2.0 * width * width + listed
        """What a test costs beside the whole vocabulary."""

    def jump(self, layer: int, state_ND: Tensor) -> Tensor:
        """What the last layer would return, by the shortcut."""
        return self.early.shortcuts.apply(state_ND, layer, self.last, self.map_mode)

    def ask(
        self, layer: int, jumped_ND: Tensor, place_N: Tensor, units: Tensor, streaks: Streaks
    ) -> Answer:
        """Who of `units`, which have got to `layer`, leaves there; `place_N` as in `Look`."""
        policy, engine = self.early.policy, self.engine
        normed_ND = engine.norm(jumped_ND)
        if self.words is None:
            logits_NV = engine.head(normed_ND)
            look = self._look(layer, logits_NV, place_N, units, streaks)
            leaves_N = policy.leaves(look)
            return Answer(leaves_N, logits_NV[leaves_N], torch.ones_like(leaves_N))
        look = self._look(layer, F.linear(normed_ND, *self.words), place_N, units, streaks)
        may_N = policy.leaves(look)
        logits = engine.head(normed_ND[may_N])
        again = Look(layer, _softmax(logits), place_N[may_N], look.streak_B[may_N])
        sure = policy.leaves(again)
        leaves_N = may_N.clone()
        leaves_N[may_N] = sure
        return Answer(leaves_N, logits[sure], may_N)

    def _look(
        self, layer: int, scores: Tensor, place_N: Tensor, units: Tensor, streaks: Streaks
    ) -> Look:
        streak_N = torch.ones_like(place_N)
        if self.early.policy.watches_streaks:
            streak_N = streaks.see(units, scores.argmax(-1))
        return Look(layer, _softmax(scores), place_N, streak_N)


def _softmax(scores: Tensor) -> Tensor:
    return scores.float().softmax(-1)
