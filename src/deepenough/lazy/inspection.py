"""Look inside a model: how far each token still moves at each step, and when it comes to rest.

For one pair, a sentence and its translation or a program and what it prints: the gate of every
token at every step, the squared cosine between its consecutive states, and that of the whole
sentence. Over many pairs: the mean of the latter, and after how many steps source tokens come to
rest at `epsilon`. All of it is recorded in the run, from which `lazy plot` draws its pictures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepenough.config import validate
from deepenough.data.translation import EncodedPairs, Pair
from deepenough.errors import UserError
from deepenough.lazy.config import (
    LAZY,
    PROGRAMS,
    REST_RECORD,
    TOKENS_RECORD,
    BeamSearchConfig,
    LazyEvalConfig,
    LazyPlotConfig,
)
from deepenough.lazy.evaluation import (
    Translator,
    encode_input,
    keep_record,
    load_translator,
    measured_pairs,
    task_of,
    translate_pairs,
)
from deepenough.lazy.programs import encode_programs, measured_programs
from deepenough.lazy.transition import sentence_similarity, step_similarity

BATCH_SIZE = 32


def inspect_run(config: LazyPlotConfig) -> None:
    """Record what one pair, and many sentences of a split, show of a run's model."""
    validate(config)
    translator = load_translator(config.run)
    model_config = translator.model.config
    if config.epsilon is None and model_config.mechanism == LAZY:
        config = replace(config, epsilon=model_config.default_epsilons[-1])
    task = task_of(config.run)
    measured = LazyEvalConfig(config.run, config.split)
    if task == PROGRAMS:
        pairs = encode_programs(measured_programs(measured)[0], translator.tokenizer)
    else:
        pairs = measured_pairs(measured, translator)
    about: dict[str, Any] = {"task": task, "mechanism": model_config.mechanism}
    if model_config.mechanism == LAZY:
        about |= {"epsilon": config.epsilon, "patience": model_config.patience}
    pair = inspect_pair(translator, _chosen(config, translator, pairs), config.epsilon)
    many = inspect_many(translator, pairs.head(config.sentences), config.epsilon)
    keep_record(config.run, TOKENS_RECORD, about | pair)
    keep_record(config.run, REST_RECORD, about | {"split": config.split} | many)


def _chosen(config: LazyPlotConfig, translator: Translator, pairs: EncodedPairs) -> Pair:
    """Return the pair to look at: the one given, or one of the split."""
    if config.source is None:
        if config.sentence >= len(pairs):
            raise UserError(
                f"The {config.split} split has {len(pairs)} pairs, counted from 0: got "
                f"{config.sentence}."
            )
        return pairs.pairs[config.sentence]
    if not config.source.strip():
        raise UserError("The source is empty: give a sentence, or a program.")
    if config.target is not None:
        return Pair(config.source, config.target)
    encoded = encode_input(translator, [Pair(config.source, "")])
    return Pair(config.source, translate_pairs(*translator, encoded, BeamSearchConfig())[0])


@torch.inference_mode()
def inspect_pair(translator: Translator, pair: Pair, epsilon: float | None) -> dict[str, Any]:
    """Return gates and similarities of all tokens and steps, of both sides."""
    model, tokenizer = translator
    batch = encode_input(translator, [pair]).batch([0], model.device)
    output = model(**batch, epsilon=0.0, decoder_epsilon=0.0, output_hidden_states=True)
    values: dict[str, Any] = {"source": pair.source, "target": pair.target}
    decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["targets"])
    for side, ids in (("encoder", batch["input_ids"]), ("decoder", decoder_ids)):
        states, gates = output[f"{side}_hidden_states"], getattr(output, f"{side}_gates")
        pieces = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        values[side] = {
            "tokens": [_readable(piece) for piece in pieces],
            "similarity": step_similarity(states)[0].tolist(),
            "sentence": sentence_similarity(states)[0].tolist(),
        }
        if gates is not None:
            values[side]["gates"] = gates[0].tolist()
    if epsilon is not None:
        values["encoder"]["depth"] = _halting_depth(model, batch, epsilon)[0].tolist()
    return values


@torch.inference_mode()
def inspect_many(
    translator: Translator, pairs: EncodedPairs, epsilon: float | None
) -> dict[str, Any]:
    """Return mean and quartiles of the sentences' similarity, and tokens by steps until rest."""
    model = translator.model
    curves: list[Tensor] = []
    depths: list[Tensor] = []
    order = pairs.source.lengths.argsort(kind="stable")
    for start in range(0, len(order), BATCH_SIZE):
        batch = pairs.batch(order[start : start + BATCH_SIZE].tolist(), model.device)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        states = model.encoder(ids, mask, epsilon=0.0, output_hidden_states=True).hidden_states
        curves.append(sentence_similarity(states, mask))
        if epsilon is not None:
            depths.append(_halting_depth(model, batch, epsilon)[mask.bool()])
    each = torch.cat(curves).double()
    values: dict[str, Any] = {
        "sentences": len(pairs),
        "similarity": each.mean(0).tolist(),
        "quartiles": [each.quantile(share, 0).tolist() for share in (0.25, 0.75)],
    }
    if depths:
        # Tokens that made the last step and were still above epsilon are counted there as well.
        counts = torch.bincount(torch.cat(depths), minlength=each.shape[1] + 1)
        values["tokens_by_steps"] = counts[1:].tolist()
    return values


def _halting_depth(model: Any, batch: dict[str, Tensor], epsilon: float) -> Tensor:
    """Return the steps that each source token makes with equilibrium exit, `[B, S]`."""
    output = model.encoder(batch["input_ids"], batch["attention_mask"], epsilon=epsilon)
    depth: Tensor = output.trace.depth
    return depth


def _readable(piece: str) -> str:
    """Return a piece as people read it: a space where a word begins, no brackets of specials."""
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("<|", "").replace("|>", "")
