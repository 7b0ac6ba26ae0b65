"""`calibrate(fast, tokenizer, texts)`: the fastest exit threshold whose risk is bounded.

The model continues the beginnings of the texts, the losses of early exits are measured on what it
wrote (`exit_losses.py`), and thresholds are tested by *Learn then Test* (arXiv 2110.01052), as in
CALM (2207.07061). A threshold has a risk, the expected loss of a text drawn like the ones given: by
default the share of tokens that differ from the full model's. From `n` texts with mean loss `r`,
the hypothesis "the risk is above `alpha`" has the Hoeffding-Bentkus p-value

    p = min( exp(-n KL(min(r, alpha) || alpha)),  e P(Bin(n, alpha) <= ceil(n r)) )

where `KL` is between Bernoulli distributions. Thresholds are tested from the most careful on, in an
order fixed beforehand, and the testing stops at the first hypothesis that cannot be rejected. Then,
whatever the losses are, all thresholds before it have a risk of at most `alpha`, with a probability
of at least `1 - delta` over the texts; the last of them is the fastest, and is taken. Tokens of one
text depend on each other, so a text counts once, with its mean.

That p-value treats a text that is wrong in 4 of 100 tokens like one in 25 texts that is all wrong.
Texts of about the same loss say more, and `betting` (arXiv 2010.09686, as in 2101.02703) uses it: a
capital that grows if the losses stay below `alpha`,

    K_i = prod_j (1 - nu_j (L_j - alpha)),   nu_j = min(1, sqrt(2 log(1 / delta) / (n s_(j-1)^2)))

where the variance `s^2` is of the losses before. If the risk is above `alpha` no bet wins on
average, so `1 / max K_i` is a p-value as well. It needs the texts in an order that says nothing of
their losses.

A guarantee is of one way to exit: this model, these maps, layers, policy and KV propagation. All of
them are saved with the threshold, `early_exit(..., guarantee=...)` restores them, and another model
or other maps are refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Binomial

from deepenough.artifacts import write_json
from deepenough.decoding.early_exit import (
    POLICIES,
    ExitPolicy,
    ExitRule,
    KVPropagation,
    ThresholdPolicy,
)
from deepenough.decoding.engine import Engine
from deepenough.decoding.exit_losses import (
    ExitLosses,
    ExitTable,
    Loss,
    disagreement,
    full_tokens,
    losses_at,
    losses_in_use,
    with_threshold,
)
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts, prompts_from
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.modeling import Shortcuts

INDEX = "calibration.json"
FORMAT, VERSION = "deepenough-calibration", 1
BOUNDS = ("hoeffding-bentkus", "betting")
#: The most careful first, finer where disagreement is small.
THRESHOLDS: tuple[float, ...] = (
    *(0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75),
    *(0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1),
)
#: Called with what is done, how much of it, and of how much (0 if that is not known).
Progress = Callable[[str, int, int], Any]


# -- learn then test -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnThenTestResult:
    """What Learn then Test found."""

    threshold: float | None
    """The fastest threshold that holds; None if none does."""
    texts: int
    risks: tuple[float, ...]
    """Mean losses of the thresholds that were tested, the most careful first."""
    p_values: tuple[float, ...]


def bernoulli_kl(a: float, b: float) -> float:
    """Return `KL(a || b)`: a log(a / b) + (1 - a) log((1 - a) / (1 - b)), with 0 log 0 = 0."""
    first = a * math.log(a / b) if a > 0 else 0.0
    second = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return first + second


def binomial_cdf(successes: int, trials: int, chance: float) -> float:
    """Return `P(Bin(trials, chance) <= successes)`."""
    counts = torch.arange(min(successes, trials) + 1, dtype=torch.float64)
    logs = Binomial(trials, torch.tensor(chance, dtype=torch.float64)).log_prob(counts)
    return min(1.0, float(logs.logsumexp(0).exp()))


def hoeffding_bentkus_p_value(mean_loss: float, texts: int, max_risk: float) -> float:
    """Return the p-value of "the risk is above `max_risk`" from a mean of losses."""
    hoeffding = math.exp(-texts * bernoulli_kl(min(mean_loss, max_risk), max_risk))
    # A mean of n numbers times n is not n times the mean: rounding must not add a success.
    successes = math.ceil(round(texts * mean_loss, 9))
    bentkus = math.e * binomial_cdf(successes, texts, max_risk)
    return min(1.0, hoeffding, bentkus)


def betting_p_value(losses_N: Tensor, max_risk: float, delta: float = 0.05) -> float:
    """Return the p-value of "the risk is above `max_risk`" from a bet against the losses."""
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


@cache
def texts_needed(max_risk: float, confidence: float, bound: str = "hoeffding-bentkus") -> int:
    """Return the fewest texts with which a threshold that never errs could be accepted.

    Without any loss the first p-value is `(1 - max_risk) ** texts`; a bet needs a little longer.
    """
    texts = math.ceil(math.log(1 - confidence) / math.log1p(-max_risk))
    while bound == "betting":
        nothing = torch.zeros(texts, dtype=torch.float64)
        if betting_p_value(nothing, max_risk, 1 - confidence) <= 1 - confidence:
            break
        texts += 1
    return texts


def learn_then_test(
    losses: Tensor | Callable[[float], Tensor],
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
    bound: str = "hoeffding-bentkus",
) -> LearnThenTestResult:
    """Return the last threshold, from the most careful on, whose risk is at most `max_risk`.

    Args:
        losses: Losses between 0 and 1, one for each text: a function that measures those `[N]` of a
            threshold, called until one fails, or a matrix `[N, number of thresholds]`.
        thresholds: Thresholds to test, the most careful first.
        max_risk: Largest expected loss of a text that is allowed.
        confidence: Probability with which the result must hold.
        bound: One of `BOUNDS`.
    """
    _check_limits(max_risk, confidence, bound)
    if isinstance(losses, Tensor):
        if losses.ndim != 2 or losses.shape[1] != len(thresholds) or not len(thresholds):
            raise UserError(
                f"Losses need a line for each text and a column for each of {len(thresholds)} "
                f"thresholds: got the shape {tuple(losses.shape)}."
            )
        losses = dict(zip(thresholds, losses.unbind(1), strict=True)).__getitem__
    risks: list[float] = []
    p_values: list[float] = []
    chosen, texts, needed = None, 0, texts_needed(max_risk, confidence, bound)
    for threshold in thresholds:
        losses_N = losses(threshold).double()
        texts = len(losses_N)
        if not bool(((losses_N >= 0) & (losses_N <= 1)).all()):
            raise UserError("Losses must be between 0 and 1: scale them.")
        if texts < needed:
            raise UserError(
                f"{texts} texts are too few to be sure: a risk of {max_risk} with confidence "
                f"{confidence} needs at least {needed}, and more if there are losses at all."
            )
        risks.append(float(losses_N.mean()))
        if bound == "betting":
            p_values.append(betting_p_value(losses_N, max_risk, 1 - confidence))
        else:
            p_values.append(hoeffding_bentkus_p_value(risks[-1], texts, max_risk))
        if p_values[-1] > 1 - confidence:
            break
        chosen = threshold
    return LearnThenTestResult(chosen, texts, tuple(risks), tuple(p_values))


def _check_limits(max_risk: float, confidence: float, bound: str) -> None:
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} must be between 0 and 1: got {value}.")
    if bound not in BOUNDS:
        raise UserError(f"A risk is bounded by {' or '.join(BOUNDS)}, not by {bound!r}.")


# -- what is saved -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """An exit threshold with a guarantee, and all that the guarantee is about."""

    threshold: float | None
    """The fastest that holds; None if none does."""
    policy: str
    policy_options: dict[str, float]
    """Options of the policy beside its threshold."""
    exit_layers: tuple[int, ...]
    kv_propagation: KVPropagation
    exit_vocab: tuple[int, ...] | None
    max_disagreement: float
    confidence: float
    bound: str
    """How the risk was bounded: hoeffding-bentkus or betting."""
    loss: str
    """What is bounded: disagreement, or the name of another loss."""
    text: str
    """Who wrote the texts: full, the full model; or self_generated, the exiting model."""
    texts: int
    tokens: int
    thresholds: tuple[float, ...]
    """Those that were tested, the most careful first."""
    risks: tuple[float, ...]
    """Mean losses of these."""
    p_values: tuple[float, ...]
    layers: float | None
    """Layers of a token at the threshold, on average."""
    model: dict[str, Any]
    maps: str
    """A hash of the maps from the exits to the last layer."""
    check: dict[str, float] | None = None
    """The same loss where the exiting model itself wrote the text."""

    def holds(self) -> str:
        """Return the result in one sentence."""
        sure = f"with confidence {self.confidence:g}"
        if self.threshold is None:
            return (
                f"No threshold holds: none has a {self.loss} of at most "
                f"{self.max_disagreement:g} {sure}, on {self.texts} texts."
            )
        risk = self.risks[self.thresholds.index(self.threshold)]
        return (
            f"Threshold {self.threshold:g} has a {self.loss} of at most "
            f"{self.max_disagreement:g} {sure}: {risk:.4f} measured on {self.texts} texts."
        )

    def exit_rule(self, shortcuts: Shortcuts, adapter: Adapter) -> ExitRule:
        """Return the calibrated way to exit; refuse another model or other maps."""
        if self.threshold is None:
            raise UserError(
                f"{self.holds()} Use speculate() instead, or calibrate with a greater "
                "max_disagreement or more texts."
            )
        policy: ExitPolicy = POLICIES[self.policy](self.threshold, **self.policy_options)  # type: ignore[call-arg]
        vocab = None if self.exit_vocab is None else torch.tensor(self.exit_vocab)
        rule = ExitRule(shortcuts, policy, self.exit_layers, self.kv_propagation, vocab)
        if self.model.get("fingerprint") != adapter.identity()["fingerprint"]:
            raise UserError(
                f"The guarantee was made for {self.model.get('model') or 'another model'}, whose "
                "weights are others: calibrate this model."
            )
        if _maps_hash(rule) != self.maps:
            raise UserError(
                "The guarantee was made with other shortcuts than these: give those, or calibrate "
                "again."
            )
        return rule

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write `calibration.json` into a folder, such as that of the shortcuts."""
        path = Path(folder) / INDEX
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)})
        except OSError as error:
            raise UserError(f"The guarantee cannot be written to {path}: {error}.") from error
        return path

    @classmethod
    def from_pretrained(cls, place: str | os.PathLike[str]) -> Calibration:
        """Read a folder with a `calibration.json`, or such a file."""
        path = Path(place) / INDEX if Path(place).is_dir() else Path(place)
        if not path.is_file():
            raise UserError(
                f"There is no guarantee at {path}: make one with deepenough decode calibrate."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT or content.pop("version") > VERSION:
                raise ValueError(f"its format is not {FORMAT} {VERSION}")
            for name in ("exit_layers", "exit_vocab", "thresholds", "risks", "p_values"):
                content[name] = None if content[name] is None else tuple(content[name])
            found = cls(**content)
            if found.policy not in POLICIES:
                raise ValueError(f"there is no policy {found.policy}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}): calibrate again.") from error
        return found


def _policy_parts(policy: ExitPolicy) -> tuple[str, dict[str, float]]:
    """Return name and options of a policy with a threshold; refuse others."""
    names = {kind: name for name, kind in POLICIES.items()}
    if not isinstance(policy, ThresholdPolicy) or type(policy) not in names:
        raise UserError(
            f"{type(policy).__name__} has no threshold to calibrate: use the policy gap, top or "
            "entropy."
        )
    options = dataclasses.asdict(policy)
    del options["threshold"]
    return names[type(policy)], options


def _maps_hash(rule: ExitRule) -> str:
    digest = hashlib.sha256()
    for layer in sorted(set(rule.layers)):
        for tensor in rule.shortcuts._map(layer, rule.shortcuts.num_layers, rule.map_mode):
            if tensor is not None:
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# -- calibrating ---------------------------------------------------------------------------------


def calibrate(
    fast: Any,
    tokenizer: Any,
    texts: Iterable[str],
    max_disagreement: float = 0.05,
    confidence: float = 0.95,
    loss: Loss = disagreement,
    *,
    text: Literal["full", "self_generated"] = "full",
    thresholds: Sequence[float] = THRESHOLDS,
    bound: str = "hoeffding-bentkus",
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch: int = 8,
    checked: int = 8,
    progress: Progress | None = None,
) -> Calibration:
    """Find the fastest of `thresholds` whose risk is at most `max_disagreement`, if there is one.

    Args:
        fast: What `early_exit` returned; its layers, KV propagation and kind of policy are
            calibrated.
        tokenizer: The model's tokenizer.
        texts: Texts whose beginnings are continued. They count as drawn independently: give them in
            random order, and not several pieces of one.
        max_disagreement: Largest expected loss of a text.
        confidence: Probability with which that must hold.
        loss: `loss(found, expected)` of the token ids of one text, between 0 and 1.
        text: Who writes the texts. In use an exiting model continues its own text, and one that
            errs may come to places where it errs more. "self_generated" lets it write the texts,
            anew for every threshold: slower, and a guarantee of just what comes out. With "full",
            by the full model, this is measured on `checked` texts at the threshold that was found.
        thresholds: Thresholds to test, the highest first.
        bound: "hoeffding-bentkus", or "betting", which needs fewer texts if their losses are alike.
        prompt_tokens: Tokens of each text that are its prompt.
        new_tokens: Most new tokens of each text.
        batch: Texts at once.
        checked: Texts that the exiting model also writes, as a check; 0 for none.
        progress: Called with what is done, how much of it, and of how much.
    """
    rule = getattr(fast, "exit_rule", None)
    if not isinstance(rule, ExitRule):
        raise UserError("Only an exiting model is calibrated: give what early_exit() returned.")
    name, options = _policy_parts(rule.policy)
    _check_limits(max_disagreement, confidence, bound)
    if not thresholds or list(thresholds) != sorted(thresholds, reverse=True):
        raise UserError("Thresholds to test are given from the highest, the most careful, down.")
    if text not in ("full", "self_generated"):
        raise UserError(f"Texts are written by the full model or self_generated, not {text!r}.")
    tell = progress or (lambda *_: None)
    prompts = list(prompts_from(tokenizer, texts, prompt_tokens))
    needed = texts_needed(max_disagreement, confidence, bound)
    if len(prompts) < needed:
        raise UserError(
            f"{len(prompts)} texts are too few: a disagreement of at most {max_disagreement} with "
            f"confidence {confidence} needs at least {needed} texts of four tokens or more, which "
            f"are {needed * new_tokens} new tokens, and more if the exits err at all."
        )
    if text == "full":
        engine: Engine = fast.decoding_engine
        measure = _on_full_text(engine, rule, prompts, new_tokens, loss, batch, tell)
    else:

        def measure(threshold: float) -> ExitLosses:
            chosen = with_threshold(rule, threshold)
            return losses_in_use(fast, chosen, prompts, new_tokens, loss, batch)

    points: dict[float, ExitLosses] = {}

    def losses(threshold: float) -> Tensor:
        points[threshold] = measure(threshold)
        tell("thresholds measured", len(points), 0)
        return points[threshold].losses_N

    found = learn_then_test(losses, thresholds, max_disagreement, confidence, bound)
    check = None
    if found.threshold is not None and checked and text == "full":
        chosen = with_threshold(rule, found.threshold)
        check = check_in_use(fast, chosen, prompts[:checked], new_tokens)
    return Calibration(
        threshold=found.threshold,
        policy=name,
        policy_options=options,
        exit_layers=tuple(sorted(set(rule.layers))),
        kv_propagation=rule.kv_propagation,
        exit_vocab=None if rule.exit_vocab is None else tuple(rule.exit_vocab.tolist()),
        max_disagreement=max_disagreement,
        confidence=confidence,
        bound=bound,
        loss=getattr(loss, "__name__", "loss"),
        texts=found.texts,
        text=text,
        tokens=points[thresholds[0]].tokens,
        thresholds=tuple(thresholds[: len(found.risks)]),
        risks=found.risks,
        p_values=found.p_values,
        layers=None if found.threshold is None else float(points[found.threshold].layers_N.mean()),
        model=fast.decoding_engine.adapter.identity(),
        maps=_maps_hash(rule),
        check=check,
    )


def write(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 8,
    tell: Progress = lambda *_: None,
) -> list[SelfGenerated]:
    """Return what the full model makes of the prompts."""
    written: list[SelfGenerated] = []
    for start in range(0, len(prompts), batch):
        written += continue_prompts(engine, prompts[start : start + batch], new_tokens)
        tell("texts written", len(written), len(prompts))
    return written


def _on_full_text(
    engine: Engine,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    loss: Loss,
    batch: int,
    tell: Progress,
) -> Callable[[float], ExitLosses]:
    """Return a function that measures a threshold on texts that the full model writes.

    One run serves all thresholds if the cache is exact whatever the threshold.
    """
    written = write(engine, prompts, new_tokens, batch, tell)
    if rule.kv_propagation == "deferred":
        table = ExitTable.collect(
            engine, rule, written, batch, lambda done, of: tell("texts measured", done, of)
        )
        return lambda threshold: table.losses_at(threshold, loss)
    expected = full_tokens(engine, written, batch)
    return lambda threshold: losses_at(
        engine, with_threshold(rule, threshold), written, expected, loss, batch
    )


def check_in_use(
    fast: Any, rule: ExitRule, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """Return disagreement and layers of a token where the exiting model writes the text itself."""
    found = losses_in_use(fast, rule, prompts, new_tokens)
    return {
        "texts": len(prompts),
        "disagreement": float(found.losses_N.mean()),
        "layers": float(found.layers_N.mean()),
    }
