"""Translations by a model, greedy or with beams, and their BLEU with sacrebleu's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from deepenough.data.translation_batches import cut_by_tokens
from deepenough.data.translation_pairs import EncodedPairs
from deepenough.errors import UserError
from deepenough.training.distributed import from_all, place_among


@dataclass
class SearchSettings:
    """Search for a translation"""

    beams: int = 4
    """Translations followed at once; 1 for the likeliest word at every place."""

    length_penalty: float = 0.6
    """Scores are divided by the length to this power: more favours longer translations."""

    tokens: int = 4096
    """Source tokens translated at once."""

    encoder_steps: int | None = None
    """Steps over the source; by default those of training."""

    decoder_steps: int | None = None
    """Steps over the translation; by default those of training."""

    epsilon: float | None = None
    """Gate (or turn, as the model rests by) below which a source token stops being updated; 0
    lets none stop."""

    decoder_epsilon: float | None = None
    """The same for tokens of the translation."""

    patience: int | None = None
    """Steps in a row for which it must be below."""

    def check(self) -> None:
        for name in ("beams", "tokens", "encoder_steps", "decoder_steps", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"search.{name} must be at least 1: got {value}.")

    def check_for(self, model: Any) -> None:
        """Refuse what this model cannot do, before anything is computed."""
        self.check()
        for name, part in (("encoder_steps", model.encoder), ("decoder_steps", model.decoder)):
            if (steps := getattr(self, name)) is not None:
                part.stack.check(steps, name)
        for name in ("epsilon", "decoder_epsilon"):
            if (epsilon := getattr(self, name)) is not None:
                model.config.check_epsilon(epsilon, name)

    def arguments(self) -> dict[str, Any]:
        """For `generate()`, what is left to the model left out."""
        names = ("encoder_steps", "decoder_steps", "epsilon", "decoder_epsilon", "patience")
        chosen = {name: getattr(self, name) for name in names}
        search: dict[str, Any] = {"num_beams": self.beams, "do_sample": False}
        if self.beams > 1:
            search["length_penalty"] = self.length_penalty
        return search | {name: value for name, value in chosen.items() if value is not None}


class Bleu(NamedTuple):
    score: float
    signature: str


def bleu(translations: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Corpus BLEU on text as people write it; sacrebleu splits words itself.

    `lowercase` is for models that write no capitals; the signature tells it (`case:lc`).
    """
    if not references:
        raise UserError("BLEU needs references: give a split with a target side.")
    if len(translations) != len(references):
        raise UserError(
            f"There are {len(translations)} translations but {len(references)} references: BLEU "
            "compares them one by one."
        )
    metric = sacrebleu.BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [list(references)])
    return Bleu(float(score.score), str(metric.get_signature()))


def translate_pairs(
    model: Any,
    tokenizer: Any,
    pairs: EncodedPairs,
    search: SearchSettings,
    advance: Callable[[int], None] | None = None,
    accelerator: Accelerator | None = None,
) -> list[str]:
    """The translation of every source, in order, each process making its share of them; `advance`
    hears how many this one has made."""
    search.check_for(model)
    rank, world = place_among(accelerator)
    made: list[tuple[int, str]] = []
    for rows in list(_batches(pairs, search.tokens))[rank::world]:
        made += zip(rows, _translate(model, tokenizer, pairs, rows, search), strict=True)
        if advance is not None:
            advance(len(rows))
    translations = [""] * len(pairs)
    for row, text in chain.from_iterable(from_all(accelerator, made)):
        translations[row] = text
    return translations


def _batches(pairs: EncodedPairs, tokens: int) -> Iterator[list[int]]:
    """Of similar length, longest first, so that memory that suffices at first suffices always."""
    lengths = pairs.source.lengths
    order = np.argsort(-lengths, kind="stable")
    for rows in cut_by_tokens(order, lengths, max(tokens, int(lengths.max()))):
        yield rows.tolist()


class _OwnLimit(StoppingCriteria):
    """Of each sentence its own, so that a translation does not depend on its batch."""

    def __init__(self, limits_B: Tensor) -> None:
        self.limits = limits_B

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """The rows of a sentence, its beams, follow one another; the first token is the start."""
        num_beams = len(input_ids) // len(self.limits)
        return self.limits.repeat_interleave(num_beams) <= input_ids.shape[1] - 1


@torch.inference_mode()
def _translate(
    model: Any, tokenizer: Any, pairs: EncodedPairs, rows: list[int], search: SearchSettings
) -> list[str]:
    batch = pairs.batch(rows, model.device)
    # A translation may be longer than its source, but hardly twice as long.
    limits = (2 * batch["attention_mask"].sum(1) + 10).clamp(max=model.config.max_positions - 1)
    written = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=int(limits.max()),
        stopping_criteria=StoppingCriteriaList([_OwnLimit(limits)]),
        **search.arguments(),
    )
    texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return [text.strip() for text in texts]
