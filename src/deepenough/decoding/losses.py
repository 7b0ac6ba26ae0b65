"""How often early exits say another word than the full model, text by text.

The texts are continuations of prompts, by the full model unless something else is said. At every
new token, with the text so far as it was written, what the exits say is compared with what the full
model says.

Where the exiting model writes the texts itself, `losses_in_use` compares its words with what the
full model would have said at the same places. On the full model's texts there are two ways to the
same losses:

- `losses_at`: the model runs once for a threshold, tokens leaving as they would, so that later
  ones find in the cache what the fill has put there (`exit_scoring.py`);
- `ExitTable`: one run for all thresholds. Confidence and word of every exit do not depend on the
  threshold as long as the cache is exact, which it is with the fill `deferred`; with the others it
  leaves out what the fill does.

The first new token is decoded with the prompt, through all layers; it counts, and is never wrong.

Shapes: B texts of a batch, T tokens, D width, N new tokens of all texts, X exits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
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
from deepenough.decoding.own_text import Written
from deepenough.decoding.request import plain_request
from deepenough.decoding.verification import decode

#: `loss(found, expected)` of the words `[T]` of one text, between 0 and 1.
Loss = Callable[[Tensor, Tensor], float]
#: States whose probabilities are held at once.
_CHUNK = 256


def disagreement(found_T: Tensor, expected_T: Tensor) -> float:
    """The share of words that are others."""
    return float((found_T != expected_T).double().mean())


@dataclass
class _Batch:
    ids_BT: Tensor
    place_BT: Tensor
    """How many new tokens come before each: 1 for the first that may leave; 0 and below: prompt."""
    says_BT: Tensor
    """Positions that predict a new token."""


def _batches(engine: Engine, texts: Sequence[Written], size: int) -> Iterator[_Batch]:
    device = engine.adapter.model.device
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        ids_BT = pad_sequence([text.ids_T for text in part], batch_first=True).to(device)
        prompt_B1 = torch.tensor([[text.prompt] for text in part], device=device)
        length_B1 = torch.tensor([[len(text.ids_T)] for text in part], device=device)
        position_T = torch.arange(ids_BT.shape[1], device=device)
        place_BT = position_T - prompt_B1 + 1
        yield _Batch(ids_BT, place_BT, (place_BT >= 0) & (position_T < length_B1 - 1))


def _words(engine: Engine, last_ND: Tensor) -> Tensor:
    return torch.cat(
        [engine.head(engine.norm(part)).argmax(-1) for part in last_ND.split(_CHUNK)]
    ).cpu()


@torch.inference_mode()
def full_words(engine: Engine, texts: Sequence[Written], batch: int = 8) -> list[Tensor]:
    """What the full model says at every new token of each text."""
    found: list[Tensor] = []
    for part in _batches(engine, texts, batch):
        last_BTD = engine.adapter.states(part.ids_BT)[-1]
        found += _by_text(_words(engine, last_BTD[part.says_BT]), part.says_BT)
    return found


@torch.inference_mode()
def exit_words(
    engine: Engine, early: ExitRule, texts: Sequence[Written], batch: int = 8
) -> tuple[list[Tensor], list[Tensor]]:
    """What the exits say at every new token of each text, and the layers that ran for it."""
    words: list[Tensor] = []
    depths: list[Tensor] = []
    for part in _batches(engine, texts, batch):
        way = ExitForwardPass(engine, early, part.place_BT, part.says_BT & (part.place_BT > 0))
        with way.patched():
            last_BTD = engine.adapter.states(part.ids_BT)[-1]
        words += _by_text(_words(engine, last_BTD[part.says_BT]), part.says_BT)
        depths += _by_text(way.depth_N.view_as(part.ids_BT)[part.says_BT].cpu(), part.says_BT)
    return words, depths


def _by_text(values_N: Tensor, says_BT: Tensor) -> list[Tensor]:
    return list(values_N.split(says_BT.sum(1).tolist()))


@dataclass
class ExitLosses:
    """Losses of texts at a threshold."""

    losses_N: Tensor
    layers_N: Tensor
    """Layers of a token on average."""
    tokens: int
    """Of all texts."""


def losses_at(
    engine: Engine,
    early: ExitRule,
    texts: Sequence[Written],
    expected: Sequence[Tensor],
    loss: Loss = disagreement,
    batch: int = 8,
) -> ExitLosses:
    """One loss a text, as the tokens leave with `early`; `expected` are `full_words`."""
    words, depths = exit_words(engine, early, texts, batch)
    return _losses(words, depths, expected, loss)


def _losses(
    words: Sequence[Tensor], depths: Sequence[Tensor], expected: Sequence[Tensor], loss: Loss
) -> ExitLosses:
    pairs = zip(words, expected, strict=True)
    return ExitLosses(
        torch.tensor([float(loss(one, other)) for one, other in pairs], dtype=torch.float64),
        torch.stack([depth.double().mean() for depth in depths]),
        sum(map(len, words)),
    )


@torch.inference_mode()
def losses_in_use(
    fast: Any,
    early: ExitRule,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    loss: Loss = disagreement,
    batch: int = 8,
) -> ExitLosses:
    """One loss a text that the exiting model writes itself, leaving by `early`: its words against
    what the full model would have said at each place."""
    engine = fast.decoding_engine
    written: list[Written] = []
    depths: list[Tensor] = []
    with fast.decoding_lock:
        engine.refresh()
        try:
            for start in range(0, len(prompts), batch):
                part = prompts[start : start + batch]
                texts, depth = _written_early(engine, early, part, new_tokens)
                written += texts
                depths += depth
        finally:
            engine.release()
    words = [text.ids_T[text.prompt :] for text in written]
    return _losses(words, depths, full_words(engine, written, batch), loss)


def _written_early(
    engine: Engine, early: ExitRule, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[Written], list[Tensor]]:
    width, model = max(map(len, prompts)), engine.adapter.model
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    request = plain_request(
        model,
        torch.tensor(rows, device=model.device),
        torch.tensor(masks, device=model.device),
        new_tokens,
        engine.adapter.max_length,
    )
    made = decode(engine, request, ExitingDepth(engine, early)).rows
    texts = [
        Written(torch.tensor(row.context), torch.empty(0), len(prompt))
        for row, prompt in zip(made, prompts, strict=True)
    ]
    return texts, [torch.tensor(row.depths) for row in made]


@dataclass
class ExitTable:
    """Confidence and word of every exit at every new token, and the full model's words."""

    layers: list[int]
    num_layers: int
    confidence: list[Tensor]
    """Of each text, `[X, T]`."""
    words: list[Tensor]
    """Likewise."""
    expected: list[Tensor]

    @classmethod
    @torch.inference_mode()
    def collect(
        cls,
        engine: Engine,
        early: ExitRule,
        texts: Sequence[Written],
        batch: int = 8,
        progress: Callable[[int, int], Any] | None = None,
    ) -> ExitTable:
        policy = early.policy
        assert isinstance(policy, ThresholdPolicy)
        test, layers = ExitCheck(engine, early), sorted(set(early.layers))
        table = cls(layers, engine.num_layers, [], [], [])
        for part in _batches(engine, texts, batch):
            states = [h_BTD[part.says_BT] for h_BTD in engine.adapter.states(part.ids_BT)]
            place_N = part.place_BT[part.says_BT]
            table.expected += _by_text(_words(engine, states[-1]), part.says_BT)
            rows = [_confidence(test, policy, layer, states[layer], place_N) for layer in layers]
            confidence_XN, words_XN = (torch.stack(each).cpu() for each in zip(*rows, strict=True))
            # The first token does not leave.
            confidence_XN[:, (place_N <= 0).cpu()] = float("-inf")
            sizes = part.says_BT.sum(1).tolist()
            table.confidence += confidence_XN.split(sizes, dim=1)
            table.words += words_XN.split(sizes, dim=1)
            if progress is not None:
                progress(len(table.expected), len(texts))
        return table

    def losses_at(self, threshold: float, loss: Loss = disagreement) -> ExitLosses:
        """One loss a text, with an exact cache."""
        words, depths = [], []
        ends = torch.tensor([*self.layers, self.num_layers])
        for confidence_XT, words_XT, full_T in zip(
            self.confidence, self.words, self.expected, strict=True
        ):
            always = torch.ones(1, len(full_T), dtype=torch.bool)
            leaves_XT = torch.cat([confidence_XT > threshold, always])
            first_T = leaves_XT.to(torch.uint8).argmax(0)  # the first exit that lets go
            words.append(torch.cat([words_XT, full_T[None]]).gather(0, first_T[None])[0])
            depths.append(ends[first_T])
        return _losses(words, depths, self.expected, loss)


def _confidence(
    test: ExitCheck, policy: ThresholdPolicy, layer: int, state_ND: Tensor, place_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Of states at an exit: below which threshold they leave, and with which word."""
    confidences, words = [], []
    for state, place in zip(state_ND.split(_CHUNK), place_N.split(_CHUNK), strict=True):
        streak = torch.ones_like(place)
        normed = test.engine.norm(test.jump(layer, state))
        logits = test.engine.head(normed)
        sure = policy.confidence(ExitObservation(layer, logits.float().softmax(-1), place, streak))
        if test.vocab_head is not None:
            listed = torch.nn.functional.linear(normed, *test.vocab_head).float().softmax(-1)
            sure = sure.minimum(policy.confidence(ExitObservation(layer, listed, place, streak)))
        confidences.append(sure)
        words.append(logits.argmax(-1))
    return torch.cat(confidences), torch.cat(words)


def with_threshold(early: ExitRule, threshold: float) -> ExitRule:
    """The same way to leave at another threshold."""
    policy = early.policy
    assert isinstance(policy, ThresholdPolicy)
    return replace(early, policy=replace(policy, threshold=threshold))
