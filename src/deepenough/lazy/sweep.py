"""BLEU for other steps than those of training, and for tokens that stop sooner or later.

The first is the source's "zero-shot inferring": a grid of encoder and decoder steps, trained or
not. The second trades BLEU for FLOPs and seconds of the encoder through `epsilon`. Every point is
recorded as it is found, so that a sweep that is stopped has not been in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepenough.errors import UserError
from deepenough.lazy.config import LAZY
from deepenough.lazy.evaluation import (
    LazyEvaluation,
    keep_record,
    load_translator,
    measure,
    measured_pairs,
)
from deepenough.lazy.tasks import TRANSLATION, task_of_run
from deepenough.lazy.translate_score import SearchSettings

STEPS, EPSILON = "steps", "epsilon"
"""Kinds of the records of the two sweeps."""
EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


@dataclass
class LazySweep(LazyEvaluation):
    """Sweep steps and epsilons."""

    encoder_steps: list[int] = field(default_factory=lambda: [2, 4, 6, 8, 9])
    """Encoder steps of the grid; an empty list for no grid."""

    decoder_steps: list[int] = field(default_factory=lambda: [2, 3, 4, 5, 6])
    """Decoder steps of the grid."""

    epsilons: list[float] | None = None
    """Gates below which source tokens stop, each measured with the steps of training; by default
    seven from 0 to 0.3 for lazy models and none for others, which have no gates."""

    sentences: int | None = None
    """Sentences to measure on; by default all of the split."""

    def check(self) -> None:
        super().check()
        if self.sentences is not None and self.sentences < 1:
            raise UserError(f"sentences must be at least 1: got {self.sentences}.")
        if (task := task_of_run(self.run)) != TRANSLATION:
            raise UserError(
                f"{self.run} was trained on {task}, but a sweep measures BLEU: give the run of a "
                "translator."
            )


def sweep(settings: LazySweep) -> Iterator[dict[str, Any]]:
    """One point after another, each with `kind` beside its values."""
    settings.check()
    translator = load_translator(settings.run)
    usual = EPSILONS if translator.model.config.mechanism == LAZY else ()
    epsilons = usual if settings.epsilons is None else settings.epsilons
    searches = list(_searches(settings, epsilons))
    for _, search in searches:  # all refused before the first is measured
        search.check_for(translator.model)
    pairs = measured_pairs(settings, translator).head(settings.sentences)
    for kind, search in searches:
        values = measure(translator, pairs, search, settings.batch_size)
        values |= {"split": settings.split, "test": settings.test}
        keep_record(settings.run, kind, values)
        yield {"kind": kind} | values


def _searches(
    settings: LazySweep, epsilons: Sequence[float]
) -> Iterator[tuple[str, SearchSettings]]:
    for encoder in settings.encoder_steps:
        for decoder in settings.decoder_steps:
            yield STEPS, replace(settings.search, encoder_steps=encoder, decoder_steps=decoder)
    for epsilon in epsilons:
        yield EPSILON, replace(settings.search, epsilon=epsilon)
