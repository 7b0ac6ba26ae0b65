"""A look inside a lazy model: how far each token still moves at each step, and when it rests.

For a chosen pair, a sentence and its translation or a program and what it prints: the gate of every
token at every step, the squared cosine between its consecutive states, and the same of the whole
sentence. Over many of them: the mean of the latter, and after how many steps source tokens come to
rest at `epsilon`. All of it is recorded in the run, from which the pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deepenough.data.translation import Pair
from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.errors import UserError
from deepenough.lazy.config import LAZY
from deepenough.lazy.evaluation import (
    LazyEvaluation,
    Translator,
    keep_record,
    load_translator,
    measured_pairs,
    source_limit,
)
from deepenough.lazy.programs_pairs import held_out_pairs
from deepenough.lazy.tasks import task_of_run
from deepenough.lazy.transition import sentence_similarity, step_similarity
from deepenough.lazy.translate_score import SearchSettings, translate_pairs

TOKENS, REST = "lazy_tokens", "lazy_rest"
"""Kinds of the records of one pair, and of many sentences."""
PROGRAMS = "programs"
BATCH = 32


@dataclass
class LazyPlot:
    """Look inside a model that translates, or executes programs."""

    run: str
    """Folder of a finished training."""

    source: str | None = None
    """Sentence or program to look at; by default one of the split."""

    target: str | None = None
    """Its translation, or what it prints; by default the model's own, or that of the split."""

    sentence: int = 0
    """Which sentence or program of the split to look at, without a source; counted from 0."""

    split: str = "test"
    """Split that the distribution is taken over: test or valid."""

    sentences: int = 256
    """Sentences or programs of the split that the distribution is taken over."""

    epsilon: float | None = None
    """Gate (or turn, as the model rests by) below which a source token is at rest; by default 0.1,
    where gates compare a state with its update 0.25, and of turns 0.008."""

    patience: int = 1
    """Steps in a row for which it must be below."""

    encoder_steps: int | None = None
    """Steps over the source; by default those of training."""

    decoder_steps: int | None = None
    """Steps over the translation; by default those of training."""

    def check(self) -> None:
        if self.sentences < 1:
            raise UserError(f"sentences must be at least 1: got {self.sentences}.")
        if self.sentence < 0:
            raise UserError(f"sentence is counted from 0: got {self.sentence}.")
        if self.epsilon is not None and not 0.0 < self.epsilon <= 1.0:
            raise UserError(f"epsilon must be above 0 and at most 1: got {self.epsilon}.")
        if self.patience < 1:
            raise UserError(f"patience must be at least 1: got {self.patience}.")
        if self.target is not None and self.source is None:
            raise UserError("A target needs its source: give both, or neither.")


def look(settings: LazyPlot) -> None:
    """Record what a pair and the sentences of a split show."""
    settings.check()
    translator = load_translator(settings.run)
    config = translator.model.config
    for name in ("encoder_steps", "decoder_steps"):
        chosen = getattr(settings, name)
        config.check_steps(getattr(config, name) if chosen is None else chosen, name)
    if settings.epsilon is None and config.mechanism == LAZY:
        settings = replace(settings, epsilon=config.usual_epsilons[-1])
    task = task_of_run(settings.run)
    pairs = _pairs(settings, translator, task)
    pair = look_at_pair(translator, _chosen(settings, translator, pairs), settings)
    many = look_at_many(translator, pairs.head(settings.sentences), settings)
    keep_record(settings.run, TOKENS, {"task": task, **pair})
    keep_record(settings.run, REST, {"task": task, **many})


def _pairs(settings: LazyPlot, translator: Translator, task: str) -> EncodedPairs:
    if task == PROGRAMS:
        return held_out_pairs(settings.run, settings.split, translator.tokenizer).pairs
    return measured_pairs(LazyEvaluation(settings.run, split=settings.split), translator)


def _chosen(settings: LazyPlot, translator: Translator, pairs: EncodedPairs) -> Pair:
    if settings.source is None:
        if settings.sentence >= len(pairs):
            raise UserError(
                f"The {settings.split} split has {len(pairs)} pairs, counted from 0: got "
                f"{settings.sentence}."
            )
        return pairs.pairs[settings.sentence]
    if not settings.source.strip():
        raise UserError("The source is empty: give a sentence, or a program.")
    if settings.target is not None:
        return Pair(settings.source, settings.target)
    search = SearchSettings(
        encoder_steps=settings.encoder_steps, decoder_steps=settings.decoder_steps
    )
    alone = _encode(translator, Pair(settings.source, ""))
    return Pair(settings.source, translate_pairs(*translator, alone, search)[0])


@torch.inference_mode()
def look_at_pair(translator: Translator, pair: Pair, settings: LazyPlot) -> dict[str, Any]:
    """Gates and similarities of all tokens and steps, of both sides."""
    model, tokenizer = translator
    encoded = _encode(translator, pair)
    batch = encoded.batch([0], model.device)
    steps = {name: getattr(settings, name) for name in ("encoder_steps", "decoder_steps")}
    output = model(**batch, **steps, epsilon=0.0, decoder_epsilon=0.0, output_hidden_states=True)
    values: dict[str, Any] = {"source": pair.source, "target": pair.target}
    values |= {"mechanism": model.config.mechanism}
    decoded = model.prepare_decoder_input_ids_from_labels(batch["targets"])
    for side, ids in (("encoder", batch["input_ids"]), ("decoder", decoded)):
        states, gates = output[f"{side}_hidden_states"], getattr(output, f"{side}_gates")
        values[side] = {
            "tokens": [_shown(piece) for piece in tokenizer.convert_ids_to_tokens(ids[0].tolist())],
            "similarity": step_similarity(states)[0].tolist(),
            "sentence": _curve(states, None)[0].tolist(),
        }
        if gates is not None:
            values[side]["gates"] = gates[0].tolist()
    if model.config.mechanism == LAZY:
        rested = _rested(model, batch, settings)
        values |= {"epsilon": settings.epsilon, "patience": settings.patience}
        values["encoder"]["depth"] = rested[0].tolist()
    return values


@torch.inference_mode()
def look_at_many(translator: Translator, pairs: EncodedPairs, settings: LazyPlot) -> dict[str, Any]:
    """Mean and quartiles of the sentences' similarity; how many tokens rest after each step."""
    model = translator.model
    num_steps = settings.encoder_steps or model.config.encoder_steps
    order = pairs.source.lengths.argsort(kind="stable")
    curves: list[Tensor] = []
    counts = torch.zeros(num_steps + 1, dtype=torch.long)
    for start in range(0, len(order), BATCH):
        batch = pairs.batch(order[start : start + BATCH].tolist(), model.device)
        mask = batch["attention_mask"]
        full = model.encoder(
            batch["input_ids"], mask, num_steps, epsilon=0.0, output_hidden_states=True
        )
        curves.append(_curve(full.hidden_states, mask))
        if model.config.mechanism == LAZY:
            depth = _rested(model, batch, settings)[mask.bool()]
            counts += torch.bincount(depth.cpu(), minlength=num_steps + 1)
    each = torch.cat(curves).double()
    values: dict[str, Any] = {
        "mechanism": model.config.mechanism,
        "split": settings.split,
        "sentences": len(pairs),
        "similarity": each.mean(0).tolist(),
        "quartiles": [each.quantile(share, 0).tolist() for share in (0.25, 0.75)],
    }
    if model.config.mechanism == LAZY:
        # Tokens that made the last step and were still above epsilon are at its place as well.
        values |= {"epsilon": settings.epsilon, "patience": settings.patience}
        values |= {"tokens_by_steps": counts[1:].tolist()}
    return values


def _rested(model: Any, batch: dict[str, Tensor], settings: LazyPlot) -> Tensor:
    """`[B, S]`: the steps that each source token makes with equilibrium exit."""
    stopped = model.encoder(
        batch["input_ids"],
        batch["attention_mask"],
        settings.encoder_steps,
        epsilon=settings.epsilon,
        patience=settings.patience,
    )
    depth: Tensor = stopped.trace.depth
    return depth


def _curve(states: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """`[B, N]`: similarity of whole sentences from step to step."""
    return torch.stack([sentence_similarity(*pair, mask) for pair in pairwise(states)], -1)


def _encode(translator: Translator, pair: Pair) -> EncodedPairs:
    limit = source_limit(translator.model)
    return encode_pairs([pair], translator.tokenizer, limit, "input", keep=True)


def _shown(piece: str) -> str:
    """A piece as people read it: a space where a word begins, special tokens without brackets."""
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("<|", "").replace("|>", "")
