"""Fit carry maps in closed form on what the model itself writes.

For map `n`, the inputs `z` of all positions of the model's own greedy texts and the states `x` they
should give make the normal equations

    (Z^T Z + ridge * diag(Z^T Z)) [B_n, b_n]^T = Z^T X

whose sums are kept in float64 while texts come and go. A part of the texts is left out of them: it
decides the ridge, as the share of its positions whose next word the map predicts, and that share is
what the maps say of themselves.

Shapes: N positions, D width, Z = (n + 1) D + 1 inputs, S shortlist, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deepenough.config import provenance
from deepenough.decoding.drafters import LinearDrafter, head_rows
from deepenough.decoding.own_text import WritingSettings, Written, write
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.statistics import make_solver

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
#: Of so many texts one is left out of the sums.
_HELD_OUT_EVERY = 10
#: Positions whose whole distribution is looked at for the shortlist.
_SAMPLED = 1024


@dataclass
class Sums:
    """`Z^T Z` and `Z^T X` of one map."""

    gram_ZZ: Tensor
    cross_ZD: Tensor
    count: int = 0

    @classmethod
    def of(cls, number: int, width: int, device: torch.device) -> Sums:
        size = (number + 1) * width + 1
        gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        return cls(gram, torch.zeros(size, width, dtype=torch.float64, device=device))

    def update(self, inputs_NZ: Tensor, states_ND: Tensor) -> None:
        self.gram_ZZ += inputs_NZ.T @ inputs_NZ
        self.cross_ZD += inputs_NZ.T @ states_ND
        self.count += len(inputs_NZ)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """`(B, b)` in float32."""
        gram = self.gram_ZZ.clone()
        squares = gram.diagonal().clone()
        gram.diagonal().add_(ridge * squares)
        solver, _ = make_solver(gram, squares * (1 + ridge))
        solution_ZD = solver(self.cross_ZD).float()
        return solution_ZD[:-1].T.contiguous(), solution_ZD[-1].clone()


@dataclass
class _Collected:
    sums: list[Sums]
    counts_V: Tensor
    held_out: list[Written] = field(default_factory=list)
    sample: list[Tensor] = field(default_factory=list)
    texts: int = 0


def fit_carry(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    maps: int = 2,
    shortlist: int = 4096,
    tokens: int = 30_000,
    prompt_tokens: int = 32,
    new_tokens: int = 96,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> LinearDrafter:
    """Let the model continue the beginnings of texts, and fit carry maps to what it wrote.

    `maps` is how many tokens can be drafted at once, `shortlist` among how many words. The rest
    says how much is written: `tokens` in all, from prompts of `prompt_tokens`, `new_tokens` each.
    """
    if min(tokens, prompt_tokens, new_tokens, batch) < 1:
        raise UserError("Tokens, prompt_tokens, new_tokens and batch must all be at least 1.")
    settings = WritingSettings(tokens, prompt_tokens, new_tokens, batch)
    written = write(model, tokenizer, texts, settings, progress)
    return fit_carry_to(adapt(model), written, maps, shortlist, asdict(settings))


def fit_carry_to(
    adapter: Adapter,
    written: Iterable[Written],
    maps: int,
    shortlist: int,
    about: Mapping[str, Any] | None = None,
) -> LinearDrafter:
    """Carry maps fitted to texts the model has written; `about` says how, and goes with them."""
    if maps < 1 or shortlist < 2:
        raise UserError("There must be at least 1 map, and 2 words in the shortlist.")
    began = time.perf_counter()
    collected = _collect(adapter, written, maps)
    needed = collected.sums[-1].gram_ZZ.shape[0]
    if not collected.held_out or collected.sums[-1].count < needed:
        raise UserError(
            f"The model wrote {collected.sums[-1].count} usable tokens, and {maps} maps of width "
            f"{adapter.width} need {needed}: give more texts, or more tokens for each."
        )
    words_S = choose_words(adapter, collected.counts_V, collected.sample, shortlist)
    fitted, agreements, ridges = [], [], []
    for number, sums in enumerate(collected.sums, start=1):
        best, agreement, ridge = _best(adapter, number, sums, collected.held_out, words_S)
        fitted.append(best)
        agreements.append(agreement)
        ridges.append(ridge)
    fit = {
        **(about or {}),
        "texts": collected.texts,
        "positions": [sums.count for sums in collected.sums],
        "ridges": ridges,
        "agreements": agreements,
        "seconds": round(time.perf_counter() - began, 3),
    }
    meta = {"model": adapter.identity(), "fit": fit, "made_with": provenance()}
    return LinearDrafter([(b.cpu(), c.cpu()) for b, c in fitted], words_S.cpu(), meta)


def _collect(adapter: Adapter, texts: Iterable[Written], maps: int) -> _Collected:
    model: Any = adapter.model
    vocabulary = len(model.get_input_embeddings().weight)
    sums = [Sums.of(number, adapter.width, model.device) for number in range(1, maps + 1)]
    collected = _Collected(sums, torch.zeros(vocabulary, dtype=torch.long))
    sampled = 0
    for text in texts:
        collected.counts_V += torch.bincount(text.ids_T[text.prompt :], minlength=vocabulary)
        if collected.texts % _HELD_OUT_EVERY == 0:
            collected.held_out.append(text)
        else:
            for number, each in enumerate(collected.sums, start=1):
                inputs_NZ, _ = inputs_of(adapter, text, number)
                each.update(inputs_NZ, text.states_TD[text.prompt + number - 1 :].float())
            if sampled < _SAMPLED:
                collected.sample.append(text.states_TD[text.prompt - 1 :])
                sampled += len(collected.sample[-1])
        collected.texts += 1
    return collected


@torch.no_grad()
def inputs_of(adapter: Adapter, text: Written, number: int) -> tuple[Tensor, Tensor]:
    """Inputs of map `number` at the new tokens of a text, `[N, Z]`, and the words that follow.

    At position `t` the map predicts the state of position `t + number - 1`, from which the word
    after it follows: so positions end where that state, or word, is not known any more.
    """
    ids_T = text.ids_T.to(adapter.model.device)
    embeddings = adapter.model.get_input_embeddings()(ids_T).float()
    embeddings = F.rms_norm(embeddings, embeddings.shape[-1:])
    first, last = text.prompt, len(ids_T) - number
    parts = [embeddings[first + ahead : last + ahead] for ahead in reversed(range(number))]
    parts.append(text.states_TD[first - 1 : last - 1].float())
    parts.append(parts[0].new_ones(max(last - first, 0), 1))
    return torch.cat(parts, dim=1), ids_T[first + number :]


@torch.no_grad()
def choose_words(adapter: Adapter, counts_V: Tensor, sample: Sequence[Tensor], size: int) -> Tensor:
    """The words written most often, most often first, then those most probable elsewhere."""
    mass_V = torch.zeros(len(counts_V), dtype=torch.float64)
    for states_ND in sample:
        probable = adapter.head(states_ND).float().softmax(-1).sum(0).double().cpu()
        mass_V[: len(probable)] += probable[: len(mass_V)]
    # A word that was written comes before all that were not: probabilities sum to less than 1 each.
    order = counts_V.double() + mass_V / (mass_V.sum() + 1)
    return order.topk(min(size, len(order))).indices.to(adapter.model.device)


def _best(
    adapter: Adapter, number: int, sums: Sums, held_out: Sequence[Written], words_S: Tensor
) -> tuple[tuple[Tensor, Tensor], float, float]:
    """The map, its agreement on texts that were left out, and the ridge that made it so."""
    head = head_rows(adapter, words_S)
    candidates = []
    for ridge in RIDGES:
        matrix, bias = sums.solve(ridge)
        right = total = 0
        for text in held_out:
            inputs_NZ, next_N = inputs_of(adapter, text, number)
            states_ND = F.linear(inputs_NZ[:, :-1], matrix, bias).to(head[0].dtype)
            drafts_N = words_S[F.linear(states_ND, *head).argmax(-1)]
            right += int((drafts_N == next_N).sum())
            total += len(next_N)
        candidates.append(((matrix, bias), right / max(total, 1), ridge))
    return max(candidates, key=lambda candidate: candidate[1])
