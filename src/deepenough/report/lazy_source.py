"""What a run has recorded of its Lazy Transformer: one pair of sentences, many, and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from deepenough.report.source import Run, number
from deepenough.runs import Record

TOKENS, REST, STEPS, EPSILON = "lazy_tokens", "lazy_rest", "steps", "epsilon"
"""Kinds of the records that are read here."""


class Words(NamedTuple):
    """What a task calls its two sides, and many of the first."""

    source: str
    target: str
    sources: str


TRANSLATION = Words("source", "translation", "source sentences")
WORDS = {"programs": Words("program", "output", "programs")}


def words_of(values: Mapping[str, Any]) -> Words:
    """Those of the task that a record names; records without one are of translators."""
    return WORDS.get(str(values.get("task")), TRANSLATION)


@dataclass(frozen=True)
class Side:
    """The tokens of one side, T of them, over N steps."""

    name: str
    tokens: list[str]
    similarity: np.ndarray
    """[T, N], squared cosine of a token's state before and after each step."""
    sentence: np.ndarray
    """[N], the same of the whole sentence."""
    gates: np.ndarray | None
    """[T, N], of lazy models."""
    depth: list[int] | None
    """Steps of each token with equilibrium exit, where it was looked at."""


@dataclass(frozen=True)
class Look:
    source: str
    target: str
    sides: Sequence[Side]
    epsilon: float | None
    words: Words = TRANSLATION

    @property
    def names(self) -> tuple[str, str]:
        """What the two sides are called."""
        return self.words.source, self.words.target


def last_look(run: Run) -> Look | None:
    """The pair that was looked at last; None where a record is not as it should be."""
    values = _last(run, TOKENS)
    if values is None:
        return None
    try:
        sides = [_side(name, values[name]) for name in ("encoder", "decoder")]
        source, target = str(values["source"]), str(values["target"])
    except (KeyError, TypeError, ValueError):
        return None
    return Look(source, target, sides, number(values.get("epsilon")), words_of(values))


def _side(name: str, values: dict[str, Any]) -> Side:
    tokens = [str(token) for token in values["tokens"]]
    similarity = np.array(values["similarity"], dtype=float)
    sentence = np.array(values["sentence"], dtype=float)
    gates, depth = values.get("gates"), values.get("depth")
    gates = None if gates is None else np.array(gates, dtype=float)
    depth = None if depth is None else [int(steps) for steps in depth]
    shape = (len(tokens), len(sentence))
    if 0 in shape or similarity.shape != shape or (gates is not None and gates.shape != shape):
        raise ValueError("a table that does not fit its tokens")
    if depth is not None and len(depth) != len(tokens):
        raise ValueError("depths that do not fit their tokens")
    return Side(name, tokens, similarity, sentence, gates, depth)


def last_rest(run: Run) -> dict[str, Any] | None:
    """What many sentences showed last."""
    values = _last(run, REST)
    if values is None or not {"sentences", "similarity", "quartiles"} <= values.keys():
        return None
    return values


def step_grid(run: Run) -> dict[tuple[int, int], float]:
    """BLEU by encoder and decoder steps, the latest of each."""
    records = _with(run, STEPS, "encoder_steps", "decoder_steps", "bleu")
    return {
        (values["encoder_steps"], values["decoder_steps"]): values["bleu"]
        for values in _like_the_last(records, "epsilon", "patience")
    }


def epsilon_points(run: Run) -> list[dict[str, Any]]:
    """The measurements of the sweep over epsilons, the latest of each, in order."""
    records = _with(run, EPSILON, "epsilon", "bleu", "encoder_flops", "encoder_seconds")
    same = ("encoder_steps", "decoder_steps", "patience")
    found = {values["epsilon"]: values for values in _like_the_last(records, *same)}
    return [found[epsilon] for epsilon in sorted(found)]


def _like_the_last(records: Sequence[Record], *names: str) -> list[dict[str, Any]]:
    """Those measured on the same sentences in the same way as the last: others do not compare."""
    same = ("split", "test", "sentences", "beams", "decoder_epsilon", *names)
    ways = [tuple(record.values.get(name) for name in same) for record in records]
    return [record.values for record, way in zip(records, ways, strict=True) if way == ways[-1]]


def _with(run: Run, kind: str, *names: str) -> list[Record]:
    """The records of a kind that have a number under each of the names."""
    return [
        record
        for record in run.records
        if record.kind == kind
        and all(number(record.values.get(name)) is not None for name in names)
    ]


def trained_steps(run: Run) -> tuple[int, int] | None:
    model = run.config.get("model", {})
    try:
        return int(model["encoder_steps"]), int(model["decoder_steps"])
    except (KeyError, TypeError, ValueError):
        return None


def _last(run: Run, kind: str) -> dict[str, Any] | None:
    found = [record.values for record in run.records if record.kind == kind]
    return found[-1] if found else None
