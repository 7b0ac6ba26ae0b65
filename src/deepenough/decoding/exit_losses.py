"""How often early exits choose another token than the full model, text by text.

The texts are continuations of prompts, by the full model unless something else is said. At every
new token, with the text so far as it was written, the token that the exits choose is compared with
the full model's.

Where the exiting model writes the texts itself, `losses_in_use` compares its tokens with those the
full model would have chosen at the same places. On the full model's texts there are two ways to the
same losses:

- `losses_at`: the model runs once for a threshold, tokens leaving as they would, so that later ones
  find in the KV cache what KV propagation puts there (`exit_scoring.py`);
- `ExitTable`: one run for all thresholds. Confidence and token of every exit do not depend on the
  threshold as long as the cache is exact, which it is with `deferred` propagation.

The first new token is decoded with the prompt, through all layers; it counts, and is never wrong.

Shapes: B texts of a batch, T tokens, D width, N new tokens of all texts, X exits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from deepenough.decoding.early_exit import (
    ExitCheck,
    ExitingDepth,
    ExitObservation,
    ExitRule,
    ThresholdPolicy,
)
from deepenough.decoding.engine import Engine
from deepenough.decoding.exit_scoring import ExitForwardPass
from deepenough.decoding.self_generated import SelfGenerated, decode_prompts

#: `loss(found, expected)` of the tokens `[T]` of one text, between 0 and 1.
Loss = Callable[[Tensor, Tensor], float]
#: States whose probabilities are held at once.
_CHUNK = 256


def disagreement(found_T: Tensor, expected_T: Tensor) -> float:
    """Return the share of tokens that differ."""
    return float((found_T != expected_T).double().mean())


def with_threshold(rule: ExitRule, threshold: float) -> ExitRule:
    """Return the same rule with another threshold."""
    policy = rule.policy
    assert isinstance(policy, ThresholdPolicy)
    return replace(rule, policy=replace(policy, threshold=threshold))


@dataclass
class _Batch:
    ids_BT: Tensor
    generated_BT: Tensor
    """New tokens up to each position: 1 for the first that may leave; 0 and below: prompt."""
    predicts_BT: Tensor
    """Positions that predict a new token."""

    def by_text(self, values_N: Tensor) -> list[Tensor]:
        """Return values of the positions that predict, split into texts."""
        return list(values_N.split(self.predicts_BT.sum(1).tolist(), dim=-1))


def _batches(engine: Engine, texts: Sequence[SelfGenerated], size: int) -> Iterator[_Batch]:
    device = engine.adapter.model.device
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        ids_BT = pad_sequence([text.ids_T for text in part], batch_first=True).to(device)
        prompt_B1 = torch.tensor([[text.prompt] for text in part], device=device)
        length_B1 = torch.tensor([[len(text.ids_T)] for text in part], device=device)
        position_T = torch.arange(ids_BT.shape[1], device=device)
        generated_BT = position_T - prompt_B1 + 1
        predicts_BT = (generated_BT >= 0) & (position_T < length_B1 - 1)
        yield _Batch(ids_BT, generated_BT, predicts_BT)


def _best_tokens(engine: Engine, last_ND: Tensor) -> Tensor:
    parts = [engine.head(engine.norm(part)).argmax(-1) for part in last_ND.split(_CHUNK)]
    return torch.cat(parts).cpu()


@torch.inference_mode()
def full_tokens(engine: Engine, texts: Sequence[SelfGenerated], batch: int = 8) -> list[Tensor]:
    """Return what the full model chooses at every new token of each text."""
    found: list[Tensor] = []
    for part in _batches(engine, texts, batch):
        last_BTD = engine.adapter.states(part.ids_BT)[-1]
        found += part.by_text(_best_tokens(engine, last_BTD[part.predicts_BT]))
    return found


@torch.inference_mode()
def exit_tokens(
    engine: Engine, rule: ExitRule, texts: Sequence[SelfGenerated], batch: int = 8
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the exits choose at every new token of each text, and the layers that ran."""
    tokens: list[Tensor] = []
    depths: list[Tensor] = []
    for part in _batches(engine, texts, batch):
        may_exit_BT = part.predicts_BT & (part.generated_BT > 0)
        exits = ExitForwardPass(engine, rule, part.generated_BT, may_exit_BT)
        with exits.patched():
            last_BTD = engine.adapter.states(part.ids_BT)[-1]
        tokens += part.by_text(_best_tokens(engine, last_BTD[part.predicts_BT]))
        depths += part.by_text(exits.depth_N.view_as(part.ids_BT)[part.predicts_BT].cpu())
    return tokens, depths


@dataclass
class ExitLosses:
    """Losses of texts at a threshold."""

    losses_N: Tensor
    layers_N: Tensor
    """Layers of a token, on average over each text."""
    tokens: int
    """New tokens of all texts."""

    @classmethod
    def compare(
        cls,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        expected: Sequence[Tensor],
        loss: Loss,
    ) -> ExitLosses:
        """Return the losses of texts, given the tokens that the full model chooses there."""
        pairs = zip(tokens, expected, strict=True)
        return cls(
            torch.tensor([float(loss(one, other)) for one, other in pairs], dtype=torch.float64),
            torch.stack([depth.double().mean() for depth in depths]),
            sum(map(len, tokens)),
        )


def losses_at(
    engine: Engine,
    rule: ExitRule,
    texts: Sequence[SelfGenerated],
    expected: Sequence[Tensor],
    loss: Loss = disagreement,
    batch: int = 8,
) -> ExitLosses:
    """Return one loss for each text, tokens leaving by `rule`; `expected` are `full_tokens`."""
    tokens, depths = exit_tokens(engine, rule, texts, batch)
    return ExitLosses.compare(tokens, depths, expected, loss)


@torch.inference_mode()
def losses_in_use(
    fast: Any,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    loss: Loss = disagreement,
    batch: int = 8,
) -> ExitLosses:
    """Return one loss for each text that the exiting model writes itself.

    Args:
        fast: What `early_exit` returned.
        rule: How tokens leave; its own rule is not used.
        prompts: Token ids of the prompts.
        new_tokens: Most new tokens of a text.
        loss: Compares its tokens with those the full model would have chosen at each place.
        batch: Texts at once.
    """
    engine: Engine = fast.decoding_engine
    written: list[SelfGenerated] = []
    depths: list[Tensor] = []
    with fast.decoding_lock:
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            rows = decode_prompts(engine, part, new_tokens, ExitingDepth(engine, rule))
            for row, prompt in zip(rows, part, strict=True):
                written.append(
                    SelfGenerated(torch.tensor(row.context), torch.empty(0), len(prompt))
                )
                depths.append(torch.tensor(row.depths))
    tokens = [text.ids_T[text.prompt :] for text in written]
    return ExitLosses.compare(tokens, depths, full_tokens(engine, written, batch), loss)


@dataclass
class ExitTable:
    """Confidence and token of every exit at every new token, and the full model's tokens."""

    layers: list[int]
    num_layers: int
    confidence: list[Tensor]
    """Of each text, `[X, T]`: the threshold below which the token leaves there."""
    tokens: list[Tensor]
    """Of each text, `[X, T]`: the token it leaves with."""
    expected: list[Tensor]
    """Of each text, `[T]`: the full model's tokens."""

    @classmethod
    @torch.inference_mode()
    def collect(
        cls,
        engine: Engine,
        rule: ExitRule,
        texts: Sequence[SelfGenerated],
        batch: int = 8,
        progress: Callable[[int, int], Any] | None = None,
    ) -> ExitTable:
        """Run the full model over texts and note what every exit would do.

        Args:
            engine: The model.
            rule: Exits and policy; its threshold does not matter.
            texts: What the full model wrote.
            batch: Texts at once.
            progress: Called with the texts done and all texts.
        """
        check, layers = ExitCheck(engine, rule), sorted(set(rule.layers))
        table = cls(layers, engine.num_layers, [], [], [])
        for part in _batches(engine, texts, batch):
            states = [h_BTD[part.predicts_BT] for h_BTD in engine.adapter.states(part.ids_BT)]
            generated_N = part.generated_BT[part.predicts_BT]
            table.expected += part.by_text(_best_tokens(engine, states[-1]))
            rows = [_confidence(check, layer, states[layer], generated_N) for layer in layers]
            confidence_XN, tokens_XN = (torch.stack(each).cpu() for each in zip(*rows, strict=True))
            # The first token does not leave.
            confidence_XN[:, (generated_N <= 0).cpu()] = float("-inf")
            table.confidence += part.by_text(confidence_XN)
            table.tokens += part.by_text(tokens_XN)
            if progress is not None:
                progress(len(table.expected), len(texts))
        return table

    def losses_at(self, threshold: float, loss: Loss = disagreement) -> ExitLosses:
        """Return one loss for each text, with an exact cache."""
        tokens, depths = [], []
        ends = torch.tensor([*self.layers, self.num_layers])
        for confidence_XT, tokens_XT, full_T in zip(
            self.confidence, self.tokens, self.expected, strict=True
        ):
            always = torch.ones(1, len(full_T), dtype=torch.bool)
            leaves_XT = torch.cat([confidence_XT > threshold, always])
            first_T = leaves_XT.to(torch.uint8).argmax(0)  # the first exit that lets go
            tokens.append(torch.cat([tokens_XT, full_T[None]]).gather(0, first_T[None])[0])
            depths.append(ends[first_T])
        return ExitLosses.compare(tokens, depths, self.expected, loss)


def _confidence(
    check: ExitCheck, layer: int, state_ND: Tensor, generated_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return below which threshold states leave at an exit, and with which token."""
    policy, engine = check.rule.policy, check.engine
    assert isinstance(policy, ThresholdPolicy)
    confidences, tokens = [], []
    for state, generated in zip(state_ND.split(_CHUNK), generated_N.split(_CHUNK), strict=True):
        streak = torch.ones_like(generated)
        normed = engine.norm(check.jump(layer, state))
        logits = engine.head(normed)
        probs = logits.float().softmax(-1)
        sure = policy.confidence(ExitObservation(layer, probs, generated, streak))
        if check.vocab_head is not None:
            partial = F.linear(normed, *check.vocab_head).float().softmax(-1)
            seen = ExitObservation(layer, partial, generated, streak)
            sure = sure.minimum(policy.confidence(seen))
        confidences.append(sure)
        tokens.append(logits.argmax(-1))
    return torch.cat(confidences), torch.cat(tokens)
