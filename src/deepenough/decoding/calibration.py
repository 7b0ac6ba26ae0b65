"""`calibrate(fast, tokenizer, texts)`: the fastest exit threshold whose risk is bounded.

The full model continues the beginnings of the texts. At every new token, with the text so far as it
was written, the token that the exits choose is compared with the full model's; the first new token
is decoded with the prompt, through all layers, and is never wrong. The loss of a text is the share
of tokens that differ, the risk of a threshold the expected loss of a text drawn like those given.

Thresholds are tested by *Learn then Test* (arXiv 2110.01052), as in CALM (2207.07061). From `n`
texts with mean loss `r`, the hypothesis "the risk is above `alpha`" has the Hoeffding-Bentkus
p-value

    p = min( exp(-n KL(min(r, alpha) || alpha)),  e P(Bin(n, alpha) <= ceil(n r)) )

where `KL` is between Bernoulli distributions. Thresholds are tested from the most careful on, in an
order fixed beforehand, and the testing stops at the first hypothesis that cannot be rejected. Then,
whatever the losses are, all thresholds before it have a risk of at most `alpha`, with a probability
of at least `1 - delta` over the texts; the last of them is the fastest, and is taken. Tokens of one
text depend on each other, so a text counts once, with its mean.

Shapes: N texts, T new tokens of a text, X exits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Binomial, kl_divergence

from deepenough.artifacts import FinishedParts, read_json, write_json
from deepenough.config import bounded, from_fields, provenance
from deepenough.decoding.early_exit import (
    POLICIES,
    ExitCheck,
    ExitPolicy,
    ExitRule,
    KVPropagation,
    ThresholdPolicy,
)
from deepenough.decoding.engine import Engine
from deepenough.decoding.exit_scoring import ExitForwardPass
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts, prompts_from
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.modeling import Shortcuts

INDEX = "calibration.json"
FORMAT, VERSION = "deepenough-calibration", 2
#: The most careful first, finer where disagreement is small.
THRESHOLDS: tuple[float, ...] = (
    *(0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75),
    *(0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1),
)


def hoeffding_bentkus_p_value(mean_loss: float, texts: int, max_risk: float) -> float:
    """Return the p-value of "the risk is above `max_risk`" from a mean of losses."""
    mean, risk = torch.tensor([min(mean_loss, max_risk), max_risk], dtype=torch.float64)
    hoeffding = math.exp(-texts * kl_divergence(Bernoulli(mean), Bernoulli(risk)))
    # A mean of n numbers times n is not n times the mean: rounding must not add a success.
    successes = min(math.ceil(round(texts * mean_loss, 9)), texts)
    counts = torch.arange(successes + 1, dtype=torch.float64)
    bentkus = math.e * float(Binomial(texts, risk).log_prob(counts).logsumexp(0).exp())
    return min(1.0, hoeffding, bentkus)


def texts_needed(max_risk: float, confidence: float) -> int:
    """Return the fewest texts with which a threshold that never errs could be accepted.

    Without any loss the p-value is `(1 - max_risk) ** texts`.
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-max_risk))


def learn_then_test(
    losses: Callable[[float], Tensor],
    thresholds: Sequence[float],
    max_risk: float = 0.05,
    confidence: float = 0.95,
) -> tuple[float | None, list[float], list[float]]:
    """Return the last threshold, from the most careful on, whose risk is at most `max_risk`.

    It is None if there is none; with it come the mean losses and the p-values of all thresholds
    that were tested.

    `losses` measures those of a threshold, between 0 and 1, one for each text `[N]`; thresholds are
    tested from the most careful down, until one fails.
    """
    risks: list[float] = []
    p_values: list[float] = []
    chosen = None
    for threshold in thresholds:
        losses_N = exact(losses(threshold))
        risks.append(float(losses_N.mean()))
        p_values.append(hoeffding_bentkus_p_value(risks[-1], len(losses_N), max_risk))
        if p_values[-1] > 1 - confidence:
            break
        chosen = threshold
    return chosen, risks, p_values


def threshold_losses(
    engine: Engine, rule: ExitRule, texts: Sequence[SelfGenerated]
) -> Callable[[float], tuple[Tensor, Tensor]]:
    """Return a function that measures losses and mean layers `[N]` at a threshold.

    The texts are the full model's; the threshold of the rule's own policy does not matter. With
    `deferred` the cache is exact whatever the threshold, and so are confidence and token of every
    exit: one run of the model serves all thresholds. Otherwise it runs once a threshold, so that
    later tokens find in the KV cache what KV propagation puts there.
    """
    if rule.kv_propagation == "deferred":
        tables = [exit_table(engine, rule, text) for text in texts]
        full = [tokens_XT[-1] for _, tokens_XT in tables]
        ends = torch.tensor([*sorted(set(rule.layers)), engine.num_layers])

        def exits(threshold: float) -> list[tuple[Tensor, Tensor]]:
            found = []
            for confidence_XT, tokens_XT in tables:
                first_T = (confidence_XT > threshold).to(torch.uint8).argmax(0)
                found.append((tokens_XT.gather(0, first_T[None])[0], ends[first_T]))
            return found
    else:
        full = [full_tokens(engine, text) for text in texts]

        def exits(threshold: float) -> list[tuple[Tensor, Tensor]]:
            policy = replace(rule.policy, threshold=threshold)  # type: ignore[type-var]
            chosen = replace(rule, policy=policy)
            return [exit_tokens(engine, chosen, text) for text in texts]

    def measure(threshold: float) -> tuple[Tensor, Tensor]:
        tokens, depths = zip(*exits(threshold), strict=True)
        pairs = zip(tokens, full, strict=True)
        losses = [exact(found_T != full_T).mean() for found_T, full_T in pairs]
        return torch.stack(losses), torch.stack([exact(depth_T).mean() for depth_T in depths])

    return measure


@torch.inference_mode()
def full_tokens(engine: Engine, text: SelfGenerated) -> Tensor:
    """Return what the full model chooses at every new token of a text, `[T]`."""
    last_TD = _new_states(engine, text)[-1]
    return engine.head(engine.norm(last_TD)).argmax(-1).cpu()


def _new_states(engine: Engine, text: SelfGenerated) -> list[Tensor]:
    """Return `h_0 ... h_L` at the positions that predict the new tokens, each `[T, D]`."""
    states = engine.adapter.states(text.ids_T[None].to(engine.adapter.model.device))
    return [hidden[0, text.prompt - 1 : -1] for hidden in states]


def exit_tokens(engine: Engine, rule: ExitRule, text: SelfGenerated) -> tuple[Tensor, Tensor]:
    """Return what the exits choose at every new token of a text, and the layers that ran."""
    generated_T = torch.arange(len(text.ids_T), device=engine.adapter.model.device)
    exits = ExitForwardPass(engine, rule, generated_T[None] - text.prompt + 1)
    with exits.patched():
        tokens_T = full_tokens(engine, text)
    return tokens_T, exits.depth_N[text.prompt - 1 : -1].cpu()


@torch.inference_mode()
def exit_table(engine: Engine, rule: ExitRule, text: SelfGenerated) -> tuple[Tensor, Tensor]:
    """Return what every exit, and at last the full model, would do at every new token of a text.

    That is the threshold below which the token leaves there, and the token it leaves with, both
    `[X, T]`.
    """
    check, states = ExitCheck(engine, rule), _new_states(engine, text)
    generated_T = torch.arange(len(states[-1]), device=states[-1].device)
    layers = sorted(set(rule.layers))
    rows = [check.confidence(layer, states[layer], generated_T) for layer in layers]
    last_T = engine.head(engine.norm(states[-1])).argmax(-1)
    rows.append((torch.full_like(rows[0][0], torch.inf), last_T))
    confidence_XT, tokens_XT = (torch.stack(each).cpu() for each in zip(*rows, strict=True))
    confidence_XT[:-1, 0] = -torch.inf  # the first new token does not leave
    return confidence_XT, tokens_XT


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """An exit threshold with a guarantee, and all that the guarantee is about."""

    threshold: float | None
    """The fastest that holds; None if none does."""
    policy: str
    policy_options: dict[str, float]
    """Options of the policy beside its threshold."""
    exit_layers: tuple[int, ...] = bounded(ge=0)
    kv_propagation: KVPropagation
    exit_vocab: tuple[int, ...] | None = bounded(ge=0)
    max_disagreement: float = bounded(gt=0, lt=1)
    confidence: float = bounded(gt=0, lt=1)
    texts: int = bounded(ge=1)
    tokens: int = bounded(ge=1)
    thresholds: tuple[float, ...]
    """Those that were tested, the most careful first."""
    risks: tuple[float, ...] = bounded(ge=0, le=1)
    """Mean losses of these."""
    p_values: tuple[float, ...] = bounded(ge=0, le=1)
    layers: float | None = bounded(ge=0)
    """Layers of a token at the threshold, on average."""
    model: dict[str, Any]
    maps: str
    """A hash of the maps from the exits to the last layer, and of those that fill the cache."""

    def verdict(self) -> str:
        """Return the result in one sentence."""
        limit, sure = f"{self.max_disagreement:g}", f"{self.confidence:g}"
        bound = f"a disagreement of at most {limit} with confidence {sure}"
        if self.threshold is None:
            return f"No threshold holds: none has {bound}, on {self.texts} texts."
        risk = f"{self.risks[self.thresholds.index(self.threshold)]:.2g}"
        return f"Threshold {self.threshold:g} has {bound}: {risk} measured on {self.texts} texts."

    def exit_rule(self, shortcuts: Shortcuts, adapter: Adapter) -> ExitRule:
        """Return the calibrated way to exit; refuse another model or other maps."""
        if self.threshold is None:
            raise UserError(
                f"{self.verdict()} Use speculate() instead, or calibrate with a greater "
                "max_disagreement or more texts."
            )
        policy: ExitPolicy = POLICIES[self.policy](self.threshold, **self.policy_options)  # type: ignore[call-arg]
        vocab = None if self.exit_vocab is None else torch.tensor(self.exit_vocab)
        rule = ExitRule(shortcuts, policy, self.exit_layers, self.kv_propagation, vocab, True)
        known = {"fingerprint": None} | self.model
        adapter.check_made_for(known, "The measurements behind this guarantee")
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
            content = read_json(path)
            if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
                raise ValueError(f"its format is not {FORMAT} {VERSION}")
            return from_fields(cls, content)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): calibrate again.") from error

    def check(self) -> None:
        """Refuse a guarantee whose parts do not fit together."""
        if self.policy not in POLICIES:
            raise UserError(f"There is no policy {self.policy!r:.40}.")
        from_fields(
            POLICIES[self.policy], {"threshold": self.threshold or 0.0, **self.policy_options}
        )
        tested = list(zip(self.thresholds, self.p_values, strict=True))
        if self.threshold is not None:
            place = self.thresholds.index(self.threshold)
            if any(p_value > 1 - self.confidence for _, p_value in tested[: place + 1]):
                raise UserError(f"The threshold {self.threshold} has not passed its test.")
        if len(self.risks) != len(tested):
            raise UserError("There is not one risk for each threshold.")


def _maps_hash(rule: ExitRule) -> str:
    digest, last = hashlib.sha256(), rule.shortcuts.num_layers
    for layer in sorted(set(rule.layers)):
        maps = [(last, rule.map_mode)]
        if rule.kv_propagation == "shortcut":
            maps += [(index, None) for index in range(layer + 1, last)]
        for index, mode in maps:
            for tensor in rule.shortcuts.pair(layer, index, mode):
                if tensor is not None:
                    digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def calibrate(
    fast: Any,
    tokenizer: Any,
    texts: Iterable[str],
    max_disagreement: float = 0.05,
    confidence: float = 0.95,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch: int = 8,
    progress: Callable[[int, int], Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Find the fastest of `thresholds` whose risk is at most `max_disagreement`, if there is one.

    Args:
        fast: What `early_exit` returned; its layers, KV propagation and kind of policy are
            calibrated.
        tokenizer: The model's tokenizer.
        texts: Texts whose beginnings the full model continues. They count as drawn independently:
            give no two pieces of one.
        max_disagreement: Largest expected share of tokens of a text that differ.
        confidence: Probability with which that must hold.
        thresholds: Thresholds to test, the highest first.
        prompt_tokens: Tokens of each text that are its prompt.
        new_tokens: Most new tokens of each text.
        batch: Texts written at once.
        progress: Called with how many texts are written, and of how many.
        resume: A folder in which texts and measurements are kept until all is done, so that an
            interrupted call goes on when it is repeated.
    """
    rule = getattr(fast, "exit_rule", None)
    if not isinstance(rule, ExitRule):
        raise UserError("Only an exiting model is calibrated: give what early_exit() returned.")
    policy = rule.policy
    names = {kind: name for name, kind in POLICIES.items()}
    if not isinstance(policy, ThresholdPolicy) or type(policy) not in names:
        raise UserError(
            f"{type(policy).__name__} has no threshold to calibrate: use the policy gap, top or "
            "entropy."
        )
    options = dataclasses.asdict(policy)
    del options["threshold"]
    for limit, value in (("max_disagreement", max_disagreement), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{limit} must be between 0 and 1: got {value}.")
    if not thresholds or list(thresholds) != sorted(thresholds, reverse=True):
        raise UserError("Thresholds to test are given from the highest, the most careful, down.")
    prompts = list(prompts_from(tokenizer, texts, prompt_tokens))
    needed = texts_needed(max_disagreement, confidence)
    if len(prompts) < needed:
        raise UserError(
            f"{len(prompts)} texts are too few: a disagreement of at most {max_disagreement} with "
            f"confidence {confidence} needs at least {needed} texts of four tokens or more, which "
            f"are {needed * new_tokens} new tokens, and more if the exits err at all."
        )
    engine: Engine = fast.decoding_engine
    identity, maps = engine.adapter.identity(with_head=True), _maps_hash(rule)
    vocab = None if rule.exit_vocab is None else tuple(rule.exit_vocab.tolist())
    decides = (identity, maps, policy, rule.layers, rule.kv_propagation, vocab, prompts, new_tokens)
    folder = None if resume is None else Path(resume)
    with FinishedParts(folder, "calibrate", *decides, batch, provenance()) as parts:

        def write(start: int) -> dict[str, Any]:
            made = continue_prompts(engine, prompts[start : start + batch], new_tokens)
            return {"texts": [(text.ids_T.tolist(), text.prompt) for text in made]}

        written: list[SelfGenerated] = []
        for start in range(0, len(prompts), batch):
            for ids, prompt in parts.get(f"texts-{start}", partial(write, start))["texts"]:
                written.append(SelfGenerated(torch.tensor(ids), torch.empty(0), prompt))
            if progress is not None:
                progress(len(written), len(prompts))
        measure = threshold_losses(engine, rule, written)
        layers: dict[float, float] = {}

        def measured(threshold: float) -> dict[str, Any]:
            losses_N, layers_N = measure(threshold)
            return {"losses": losses_N.tolist(), "layers": float(layers_N.mean())}

        def losses(threshold: float) -> Tensor:
            part = parts.get(f"threshold-{threshold}", partial(measured, threshold))
            layers[threshold] = part["layers"]
            return torch.tensor(part["losses"], dtype=torch.float64)

        found, risks, p_values = learn_then_test(losses, thresholds, max_disagreement, confidence)
        calibration = Calibration(
            threshold=found,
            policy=names[type(policy)],
            policy_options=options,
            exit_layers=tuple(sorted(set(rule.layers))),
            kv_propagation=rule.kv_propagation,
            exit_vocab=vocab,
            max_disagreement=max_disagreement,
            confidence=confidence,
            texts=len(written),
            tokens=sum(len(text.ids_T) - text.prompt for text in written),
            thresholds=tuple(thresholds[: len(risks)]),
            risks=tuple(risks),
            p_values=tuple(p_values),
            layers=None if found is None else layers[found],
            model=identity,
            maps=maps,
        )
        if folder is not None:
            calibration.save_pretrained(folder)
    return calibration
