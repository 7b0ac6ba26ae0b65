"""Look inside a model: how far each token still moves at each step, and when it comes to rest.

For one pair, a sentence and its translation or a program and what it prints: the gate of every
token at every step, the squared cosine between its consecutive states, and that of the whole
sentence. Over many pairs: the mean of the latter, and after how many steps source tokens come to
rest at `epsilon`. All of it is recorded in the run, from which `lazy plot` draws its pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
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
    LazyPlotConfig,
    ProgramTrainConfig,
    TranslationEvalConfig,
)
from deepenough.lazy.evaluation import (
    Translator,
    encode_input,
    keep_record,
    load_translator,
    measured_pairs,
    task_of,
    trained_with,
    translate_pairs,
)
from deepenough.lazy.programs import encode_programs, held_out_programs
from deepenough.lazy.transition import sentence_similarity, step_similarity

BATCH_SIZE = 32


def inspect_run(config: LazyPlotConfig) -> None:
    """Record what one pair, and many sentences of a split, show of a run's model."""
    validate(config)
    translator = load_translator(config.run)
    model_config = translator.model.config
    for name in ("encoder_steps", "decoder_steps"):
        chosen = getattr(config, name)
        model_config.check_steps(getattr(model_config, name) if chosen is None else chosen, name)
    if config.epsilon is None and model_config.mechanism == LAZY:
        config = replace(config, epsilon=model_config.default_epsilons[-1])
    task = task_of(config.run)
    pairs = _pairs(config, translator, task)
    pair = inspect_pair(translator, _chosen(config, translator, pairs), config)
    many = inspect_many(translator, pairs.head(config.sentences), config)
    keep_record(config.run, TOKENS_RECORD, {"task": task, **pair})
    keep_record(config.run, REST_RECORD, {"task": task, **many})


def _pairs(config: LazyPlotConfig, translator: Translator, task: str) -> EncodedPairs:
    if task == PROGRAMS:
        trained = trained_with(ProgramTrainConfig, config.run)
        programs = held_out_programs(trained.dataset, config.split, trained.train.seed)
        return encode_programs(programs, translator.tokenizer)
    return measured_pairs(TranslationEvalConfig(config.run, split=config.split), translator)


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
    search = BeamSearchConfig(
        encoder_steps=config.encoder_steps, decoder_steps=config.decoder_steps
    )
    encoded = encode_input(translator, [Pair(config.source, "")])
    return Pair(config.source, translate_pairs(*translator, encoded, search)[0])


@torch.inference_mode()
def inspect_pair(translator: Translator, pair: Pair, config: LazyPlotConfig) -> dict[str, Any]:
    """Return gates and similarities of all tokens and steps, of both sides."""
    model, tokenizer = translator
    batch = encode_input(translator, [pair]).batch([0], model.device)
    steps = {name: getattr(config, name) for name in ("encoder_steps", "decoder_steps")}
    output = model(**batch, **steps, epsilon=0.0, decoder_epsilon=0.0, output_hidden_states=True)
    values: dict[str, Any] = {"source": pair.source, "target": pair.target}
    values |= {"mechanism": model.config.mechanism}
    decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["targets"])
    for side, ids in (("encoder", batch["input_ids"]), ("decoder", decoder_ids)):
        states, gates = output[f"{side}_hidden_states"], getattr(output, f"{side}_gates")
        pieces = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        values[side] = {
            "tokens": [_readable(piece) for piece in pieces],
            "similarity": step_similarity(states)[0].tolist(),
            "sentence": _sentence_curve(states, None)[0].tolist(),
        }
        if gates is not None:
            values[side]["gates"] = gates[0].tolist()
    if model.config.mechanism == LAZY:
        depth = _halting_depth(model, batch, config)
        values |= {"epsilon": config.epsilon, "patience": config.patience}
        values["encoder"]["depth"] = depth[0].tolist()
    return values


@torch.inference_mode()
def inspect_many(
    translator: Translator, pairs: EncodedPairs, config: LazyPlotConfig
) -> dict[str, Any]:
    """Return mean and quartiles of the sentences' similarity, and tokens by steps until rest."""
    model = translator.model
    num_steps = config.encoder_steps or model.config.encoder_steps
    order = pairs.source.lengths.argsort(kind="stable")
    curves: list[Tensor] = []
    counts = torch.zeros(num_steps + 1, dtype=torch.long)
    for start in range(0, len(order), BATCH_SIZE):
        batch = pairs.batch(order[start : start + BATCH_SIZE].tolist(), model.device)
        mask = batch["attention_mask"]
        full = model.encoder(
            batch["input_ids"], mask, num_steps, epsilon=0.0, output_hidden_states=True
        )
        curves.append(_sentence_curve(full.hidden_states, mask))
        if model.config.mechanism == LAZY:
            depth = _halting_depth(model, batch, config)[mask.bool()]
            counts += torch.bincount(depth.cpu(), minlength=num_steps + 1)
    each = torch.cat(curves).double()
    values: dict[str, Any] = {
        "mechanism": model.config.mechanism,
        "split": config.split,
        "sentences": len(pairs),
        "similarity": each.mean(0).tolist(),
        "quartiles": [each.quantile(share, 0).tolist() for share in (0.25, 0.75)],
    }
    if model.config.mechanism == LAZY:
        # Tokens that made the last step and were still above epsilon are counted there as well.
        values |= {"epsilon": config.epsilon, "patience": config.patience}
        values |= {"tokens_by_steps": counts[1:].tolist()}
    return values


def _halting_depth(model: Any, batch: dict[str, Tensor], config: LazyPlotConfig) -> Tensor:
    """Return the steps that each source token makes with equilibrium exit, `[B, S]`."""
    output = model.encoder(
        batch["input_ids"],
        batch["attention_mask"],
        config.encoder_steps,
        epsilon=config.epsilon,
        patience=config.patience,
    )
    depth: Tensor = output.trace.depth
    return depth


def _sentence_curve(states: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the similarity of whole sentences from step to step, `[B, N]`."""
    return torch.stack([sentence_similarity(*pair, mask) for pair in pairwise(states)], -1)


def _readable(piece: str) -> str:
    """Return a piece as people read it: a space where a word begins, no brackets of specials."""
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("<|", "").replace("|>", "")
