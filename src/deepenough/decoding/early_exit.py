"""Early exit: a token leaves at the first checked layer whose prediction a policy trusts.

At a layer where exits are checked, the state is taken to the last layer by its shortcut, normed and
projected on the vocabulary, and a policy looks at the probabilities. Layers behind the exit do not
run for the token. In a batch, sequences that leave are taken out of the deeper layers' computation
and come back with their next token. Unlike speculation this changes what is generated: how often is
a matter of the threshold (`calibration.py`). The prompt, and so the first token, runs through all
layers.

Where the check is restricted to a part of the vocabulary, only a token that would leave pays for
the whole vocabulary, which it needs anyway to be chosen, and is then checked again: so nothing
leaves that would not leave otherwise.

Later tokens attend to every layer, also to those an earlier token skipped. KV propagation says what
they find there:

- `shortcut`: layer `j` gets keys and values from `A_(l->j) h_l`, the state that the shortcut says
  it would have read;
- `copy`: from `h_l` itself (Confident Adaptive Language Modeling, arXiv 2207.07061);
- `deferred`: nothing, until a later token of the sequence goes deeper: then both go, in one pass,
  and the keys and values are exact.

Shapes: B sequences, N states, T tokens, D width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from deepenough.decoding.config import KVPropagation as KVPropagation
from deepenough.decoding.drafters import head_rows
from deepenough.decoding.engine import Engine, Step
from deepenough.decoding.request import Request, SequenceState
from deepenough.decoding.verification import ForwardStrategy, PassOutput
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts

KV_PROPAGATIONS: tuple[KVPropagation, ...] = get_args(KVPropagation)

# -- policies ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExitObservation:
    """What a policy sees of tokens at one layer."""

    layer: int
    probs_BV: Tensor
    """Predicted probabilities, of the whole vocabulary or a part of it."""
    num_generated_B: Tensor
    """How many tokens each sequence has generated."""


class ExitPolicy(ABC):
    """Decides which tokens may leave at a layer."""

    @abstractmethod
    def exits(self, seen: ExitObservation) -> Tensor:
        """Return which tokens leave, booleans `[B]`."""


@dataclass(frozen=True)
class ThresholdPolicy(ExitPolicy):
    """Lets a token leave where its confidence, whatever the threshold, exceeds `threshold`."""

    threshold: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise UserError(f"A threshold must be between 0 and 1: got {self.threshold}.")

    @abstractmethod
    def confidence(self, seen: ExitObservation) -> Tensor:
        """Return the confidence of each token, `[B]`."""

    def exits(self, seen: ExitObservation) -> Tensor:
        """Return which tokens are confident enough, booleans `[B]`."""
        return self.confidence(seen) > self.threshold


@dataclass(frozen=True)
class ConfidenceGap(ThresholdPolicy):
    """The gap between the two best exceeds `0.9 lambda + 0.1 exp(-4 t / N)` (CALM, 2207.07061)."""

    mean_length: float = 128.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mean_length > 0:
            raise UserError(f"mean_length must be above 0: got {self.mean_length}.")

    def confidence(self, seen: ExitObservation) -> Tensor:
        """Return the gap between the two best tokens, less what the position asks for."""
        best = seen.probs_BV.topk(2, dim=-1).values
        decay = torch.exp(-4.0 * seen.num_generated_B / self.mean_length)
        return (best[:, 0] - best[:, 1] - 0.1 * decay) / 0.9


@dataclass(frozen=True)
class TopProbability(ThresholdPolicy):
    """The best token is more probable than the threshold."""

    def confidence(self, seen: ExitObservation) -> Tensor:
        """Return the probability of the best token."""
        return seen.probs_BV.amax(-1)


@dataclass(frozen=True)
class LowEntropy(ThresholdPolicy):
    """The entropy is below `1 - threshold` of what it could be."""

    def confidence(self, seen: ExitObservation) -> Tensor:
        """Return one minus the entropy, relative to that of the uniform distribution."""
        entropy = torch.special.entr(seen.probs_BV).sum(-1)
        return 1 - entropy / math.log(seen.probs_BV.shape[-1])


@dataclass(frozen=True)
class FixedLayer(ExitPolicy):
    """Every token leaves at the first checked layer from `layer` on."""

    layer: int

    def exits(self, seen: ExitObservation) -> Tensor:
        """Return True for all tokens from the layer on, booleans `[B]`."""
        return torch.full_like(seen.num_generated_B, seen.layer >= self.layer, dtype=torch.bool)


POLICIES: dict[str, type[ExitPolicy]] = {
    "gap": ConfidenceGap,
    "top": TopProbability,
    "entropy": LowEntropy,
    "layer": FixedLayer,
}


def make_policy(name: str, value: float | None = None) -> ExitPolicy:
    """Return a policy by name; `value` is its threshold, 0.9 by default, or its layer."""
    if name not in POLICIES:
        raise UserError(f"There is no policy {name!r}: choose one of {', '.join(POLICIES)}.")
    if value is not None and not isinstance(value, int | float):
        raise UserError(
            f"A threshold is a number, not {value!r}: give a policy of your own as policy=..."
        )
    if name == "layer":
        if value is None or not float(value).is_integer():
            raise UserError("The policy layer needs to know which: give it as the threshold.")
        return FixedLayer(int(value))
    return POLICIES[name](0.9 if value is None else float(value))  # type: ignore[call-arg]


# -- the check at an exit ------------------------------------------------------------------------


@dataclass
class ExitRule:
    """Where tokens may leave, who decides, and what they leave in the KV cache."""

    shortcuts: Shortcuts
    policy: ExitPolicy
    layers: Sequence[int]
    """Layers after which exits are checked."""
    kv_propagation: KVPropagation = "shortcut"
    exit_vocab: Tensor | None = None
    """Tokens on which the check is made first; None for the whole vocabulary."""
    guaranteed: bool = False
    """Whether a guarantee was made for it, with the model as it was then."""

    @property
    def map_mode(self) -> str | None:
        """Which maps lead to the last layer: tuned ones, where all exits have them."""
        tuned = self.shortcuts.tuned
        return "tuned" if all(layer in tuned for layer in self.layers) else None

    def check(self, engine: Engine) -> None:
        """Refuse what cannot be done with a model."""
        last = engine.num_layers
        if not self.layers or not all(0 < layer < last for layer in self.layers):
            raise UserError(
                f"Exits are checked after some of the layers 1 to {last - 1}, not after "
                f"{list(self.layers)}: give exit_layers among them."
            )
        if self.kv_propagation not in KV_PROPAGATIONS:
            raise UserError(
                f"kv_propagation is one of {', '.join(KV_PROPAGATIONS)}: got "
                f"{self.kv_propagation!r}."
            )
        if self.kv_propagation == "shortcut" and self.shortcuts.targets != "all":
            raise UserError(
                "Shortcuts to the last layer alone cannot fill the KV cache: fit them with "
                'targets="all", or set kv_propagation to copy or deferred.'
            )
        if self.kv_propagation == "deferred" and not engine.takes_groups:
            raise UserError(
                f"{type(engine.adapter.model).__name__} is run through its own layers, which take "
                "one token of each sequence at a time and cannot catch up on several: set "
                "kv_propagation to shortcut or copy."
            )
        vocab = self.exit_vocab
        if vocab is not None and (vocab.ndim != 1 or vocab.dtype != torch.long or len(vocab) < 2):
            raise UserError("exit_vocab is a row of at least two token ids.")

    def next_input(self, state_ND: Tensor, depth: int, index: int) -> Tensor:
        """Return what layer `index` (from 0) is taken to have read of tokens that left at `depth`.

        Their keys and values there are made of it.
        """
        if self.kv_propagation == "copy":
            return state_ND
        return self.shortcuts.apply(state_ND, depth, index, keep=True)


@dataclass
class ExitDecision:
    """Which of N tokens leave at a layer; tokens are named by their places among the N."""

    leaving: list[int]
    logits: Tensor
    """Of those that leave, `[n, V]`."""
    full_head: list[int]
    """For which tokens the logits of the whole vocabulary were computed."""


class ExitCheck:
    """The check at the exits of one model."""

    def __init__(self, engine: Engine, rule: ExitRule) -> None:
        self.engine, self.rule = engine, rule
        self.map_mode = rule.map_mode
        self.vocab_head: tuple[Tensor, Tensor | None] | None = None
        self.flops = 2.0 * engine.adapter.width**2
        """What a check costs beside the whole head."""
        self.maps = engine.exit_maps(rule.shortcuts, rule.exit_vocab)
        """Maps and head as the engine's backend applies them, None as torch does."""
        vocab = rule.exit_vocab
        if vocab is not None:
            self.flops += 2.0 * len(vocab) * engine.adapter.width
            if self.maps is None:
                device = engine.adapter.model.device
                self.vocab_head = head_rows(engine.adapter, vocab.to(device))

    def jump(self, layer: int, state_ND: Tensor) -> Tensor:
        """Return what the last layer would return, by the shortcut from `layer`."""
        last, mode = self.engine.num_layers, self.map_mode
        if self.maps is None:
            return self.rule.shortcuts.apply(state_ND, layer, last, mode, keep=True)
        jumped: Tensor = self.maps.apply(state_ND, layer, last, mode)
        return jumped

    def partial_logits(self, normed_ND: Tensor) -> Tensor | None:
        """Return the logits of the tokens that are looked at first, None if all are."""
        if self.rule.exit_vocab is None:
            return None
        if self.vocab_head is not None:
            return F.linear(normed_ND, *self.vocab_head)
        found: Tensor = self.maps.logits(normed_ND)
        return found

    def decide(self, layer: int, jumped_ND: Tensor, generated_N: Tensor) -> ExitDecision:
        """Decide which tokens leave at a layer, from what `jump` made of their states.

        `generated_N` is how many tokens their sequences have generated. The decision is read from
        the device once, or twice where a part of the vocabulary is looked at first.
        """
        policy, normed_ND = self.rule.policy, self.engine.norm(jumped_ND)
        full_head = list(range(len(normed_ND)))
        partial = self.partial_logits(normed_ND)
        if partial is not None:
            full_head = _places(policy.exits(_observed(layer, partial, generated_N)))
            normed_ND, generated_N = normed_ND[full_head], generated_N[full_head]
        logits = self.engine.head(normed_ND)
        sure = _places(policy.exits(_observed(layer, logits, generated_N)))
        return ExitDecision([full_head[place] for place in sure], logits[sure], full_head)

    def confidence(
        self, layer: int, state_ND: Tensor, generated_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return below which threshold states leave at a layer, and with which token, both `[N]`.

        The threshold of the rule's policy does not matter.
        """
        policy, normed_ND = self.rule.policy, self.engine.norm(self.jump(layer, state_ND))
        assert isinstance(policy, ThresholdPolicy)
        logits_NV = self.engine.head(normed_ND)
        sure_N = policy.confidence(_observed(layer, logits_NV, generated_N))
        partial = self.partial_logits(normed_ND)
        if partial is not None:
            sure_N = sure_N.minimum(policy.confidence(_observed(layer, partial, generated_N)))
        return sure_N, logits_NV.argmax(-1)


def _places(flags_N: Tensor) -> list[int]:
    return [place for place, flag in enumerate(flags_N.tolist()) if flag]


def _observed(layer: int, logits: Tensor, generated_N: Tensor) -> ExitObservation:
    return ExitObservation(layer, logits.float().softmax(-1), generated_N)


# -- decoding ------------------------------------------------------------------------------------


class PartialDepthPass:
    """The latest tokens of all sequences on their way up, each as far as it goes.

    Deferred tokens wait where they left, the oldest deepest: a later token takes along all that
    wait where it comes by. They are neighbours, so a group on its way is always a run of tokens up
    to the latest.
    """

    def __init__(self, engine: Engine, rule: ExitRule) -> None:
        self.engine, self.rule = engine, rule
        self.waiting: dict[tuple[int, int], Tensor] = {}
        """By sequence and layer: states `[n, D]` of tokens that wait there."""
        self.moving: list[Tensor] = []
        """States of each sequence on their way; the last is the latest token's."""
        self.contexts: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}
        """What layers need for so many tokens of some sequences, made once in a pass."""

    def begin(self, rows: Sequence[SequenceState]) -> None:
        """Embed the latest token of every sequence."""
        device = self.engine.adapter.model.device
        tokens_B1 = torch.tensor([[row.context[-1]] for row in rows], device=device)
        step = self.engine.start_step(tokens_B1)
        self.moving = list(step.hidden)
        self.contexts = {(tuple(range(len(rows))), (1,) * len(rows)): step.context}

    def climb(
        self, rows: Sequence[SequenceState], places: Sequence[int], first: int, last: int
    ) -> Tensor:
        """Run layers `first + 1 ... last` for some sequences; return the latest states `[n, D]`."""
        for place in places:
            here = (rows[place].index, first)
            if here in self.waiting:
                self.moving[place] = torch.cat([self.waiting.pop(here), self.moving[place]])
        step = self._step(places)
        hidden_BTD = self.engine.run_layers(step, step.hidden, first, last)
        for place, states_TD in zip(places, hidden_BTD, strict=True):
            self.moving[place] = states_TD[: len(self.moving[place])]
        return torch.stack([self.moving[place][-1] for place in places])

    def _step(self, places: Sequence[int]) -> Step:
        """Return a step of all tokens of some sequences that are on their way."""
        groups = [self.moving[place] for place in places]
        # What pads shorter groups lands behind the latest token, where nobody looks.
        hidden_BTD = pad_sequence(groups, batch_first=True)
        sizes = tuple(map(len, groups))
        chosen = (tuple(places), sizes)
        if chosen not in self.contexts:
            ends = [self.engine.lengths[place] + 1 for place in places]
            starts = [end - size for end, size in zip(ends, sizes, strict=True)]
            self.contexts[chosen] = self.engine.resume(hidden_BTD, starts, places).context
        return Step(hidden_BTD, 0, self.contexts[chosen])

    def leave(self, rows: Sequence[SequenceState], places: Sequence[int], layer: int) -> None:
        """Let these sequences' tokens go no further than `layer`, and propagate their KV."""
        if self.rule.kv_propagation == "deferred":
            for place in places:
                here, group = (rows[place].index, layer), self.moving[place]
                self.waiting[here] = torch.cat([self.waiting.get(here, group[:0]), group])
            return
        step = self._step(places)
        left_BD = step.hidden[:, 0]
        maps = self.engine.exit_maps(self.rule.shortcuts, self.rule.exit_vocab)
        if maps is not None:
            maps.fill(step, left_BD, layer, self.rule.kv_propagation == "copy")
            return
        for index in range(layer, self.engine.num_layers):
            self.engine.write_kv(index, self.rule.next_input(left_BD, layer, index), step)


class ExitingDepth(ForwardStrategy):
    """Each token runs until the first layer at which the policy lets it leave."""

    def __init__(self, engine: Engine, rule: ExitRule) -> None:
        super().__init__(engine)
        self.rule = rule
        self.check = ExitCheck(engine, rule)
        self.forward = PartialDepthPass(engine, rule)
        self.ends = [*sorted(set(rule.layers)), engine.num_layers]

    def capacity(self, request: Request) -> int:
        """Return room for all tokens; groups of deferred ones are padded behind the latest."""
        groups = 2 if self.rule.kv_propagation == "deferred" else 1
        return groups * request.max_length + 1

    def run(self, rows: list[SequenceState]) -> PassOutput:
        """Run each sequence's last token up to its exit."""
        engine, last = self.engine, self.engine.num_layers
        device = engine.adapter.model.device
        going = list(range(len(rows)))
        depths, overhead = [last] * len(rows), [0.0] * len(rows)
        generated_B = torch.tensor([len(row.tokens) for row in rows], device=device)
        logits: dict[int, Tensor] = {}
        self.forward.begin(rows)
        for first, end in pairwise([0, *self.ends]):
            state_BD = self.forward.climb(rows, going, first, end)
            for place in going:  # tokens that it takes along are at its cost
                one = engine.costs.token(len(rows[place].context), first, end)
                overhead[place] += one * (len(self.forward.moving[place]) - 1)
            if end == last:
                logits |= dict(zip(going, engine.head(engine.norm(state_BD)), strict=True))
                break
            jumped_BD = self.check.jump(end, state_BD)
            decision = self.check.decide(end, jumped_BD, generated_B[going])
            leaving = [going[place] for place in decision.leaving]
            for place in going:
                overhead[place] += self.check.flops
            for place in leaving:  # with the head of its choice, which is counted there
                depths[place] = end
                overhead[place] += self.engine.costs.filling(end, self.rule.kv_propagation)
            for place in {going[place] for place in decision.full_head} - set(leaving):
                overhead[place] += self.engine.costs.head
            if leaving:
                self.forward.leave(rows, leaving, end)
                logits |= dict(zip(leaving, decision.logits, strict=True))
            going = [place for place in going if place not in leaving]
            if not going:
                break
        stacked_BV = torch.stack([logits[place] for place in range(len(rows))])
        return PassOutput(stacked_BV[:, None], [[] for _ in rows], depths, overhead)
