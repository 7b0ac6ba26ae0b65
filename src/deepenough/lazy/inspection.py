"""A look inside a finished model: what its figures show of one sentence, program or text."""

from typing import Any

import torch
from torch import Tensor

from deepenough.config import validate
from deepenough.data.translation import Pair
from deepenough.errors import UserError
from deepenough.lazy.config import (
    LAZY,
    PROGRAMS,
    TOKENS_RECORD,
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyEvalConfig,
    LazyPlotConfig,
)
from deepenough.lazy.evaluation import measured_pairs, measured_tokens
from deepenough.lazy.inference import (
    TrainedModel,
    encode_input,
    keep_record,
    load_model,
    task_of,
    trained_with,
    translate_pairs,
)
from deepenough.lazy.programs import measured_programs
from deepenough.lazy.transition import step_cka, step_similarity


@torch.inference_mode()
def inspect_run(config: LazyPlotConfig) -> None:
    """Record how much each token of a text still changes at each step, for `lazy plot` to draw.

    Of each side: gates, the squared cosine between a token's consecutive states, that of the
    sentence's mean, and the CKA of all its states at any two steps. Of the source, or of a language
    model's text, also the steps that its tokens make at `epsilon`.
    """
    validate(config)
    if config.source is not None and not config.source.strip():
        raise UserError("The source is empty: give a sentence, a program or a text.")
    model, tokenizer = loaded = load_model(config.run)
    if model.config.is_encoder_decoder:
        pair = _inspected_pair(config, loaded)
        values: dict[str, Any] = {"source": pair.source, "target": pair.target}
        batch = encode_input(loaded, [pair]).batch([0], model.device)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["targets"])
        sides = {"encoder": batch["input_ids"], "decoder": decoder_ids}
        halting = "epsilon"
    else:
        ids = _inspected_text(config, loaded)
        values = {"source": tokenizer.decode(ids[0], skip_special_tokens=True)}
        batch, sides = {"input_ids": ids}, {"decoder": ids}
        halting = "decoder_epsilon"
    output = model(**batch, epsilon=0.0, decoder_epsilon=0.0, output_hidden_states=True)
    for name, ids in sides.items():
        states, gates = output[f"{name}_hidden_states"], getattr(output, f"{name}_gates")
        pieces = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        values[name] = {
            "tokens": [_readable(piece) for piece in pieces],
            "similarity": step_similarity(states)[0].tolist(),
            "sentence": step_similarity([state.mean(1) for state in states])[0].tolist(),
            "cka": step_cka([state[0] for state in states]).tolist(),
        }
        if gates is not None:
            values[name]["gates"] = gates[0].tolist()
    if model.config.mechanism == LAZY:
        values["halt_on"] = config.halt_on or model.config.halt_on
        values["epsilon"] = config.epsilon or model.config.default_epsilons(config.halt_on)[-1]
        halted = model(**batch, **{halting: values["epsilon"]}, halt_on=config.halt_on)
        side, trace = next(iter(sides)), halted.encoder_trace or halted.trace
        values[side]["depth"] = trace.depth[0].tolist()
    keep_record(config.run, TOKENS_RECORD, values)


def _inspected_pair(config: LazyPlotConfig, translator: TrainedModel) -> Pair:
    """Return the pair to look at: the one given, or one of the split."""
    if config.source is None:
        measured = LazyEvalConfig(config.run)
        if task_of(config.run) == PROGRAMS:
            pairs = [Pair(each.source, each.target) for each in measured_programs(measured)[0]]
        else:
            pairs = measured_pairs(measured, translator).pairs
        if config.sentence >= len(pairs):
            raise UserError(
                f"The test split has {len(pairs)} pairs, counted from 0: got {config.sentence}."
            )
        return pairs[config.sentence]
    encoded = encode_input(translator, [Pair(config.source, "")])
    return Pair(config.source, translate_pairs(*translator, encoded, BeamSearchConfig())[0])


def _inspected_text(config: LazyPlotConfig, writer: TrainedModel) -> Tensor:
    """Return the ids of the text to look at, `[1, T]`: of the one given, or a test segment."""
    length = writer.model.config.max_positions
    if config.source is not None:
        ids = writer.tokenizer.encode(config.source, add_special_tokens=False)[:length]
        return torch.tensor([ids], device=writer.model.device)
    length = trained_with(LanguageTrainConfig, config.run).dataset.length
    tokens = measured_tokens(LazyEvalConfig(config.run), writer)
    segment = tokens.ids[config.sentence * length : (config.sentence + 1) * length]
    if not len(segment):
        number = -(-len(tokens) // length)
        raise UserError(
            f"The test split has {number} segments, counted from 0: got {config.sentence}."
        )
    return torch.tensor([segment.tolist()], device=writer.model.device)


def _readable(piece: str) -> str:
    """Return a piece as people read it: a space where a word begins, no brackets of specials."""
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("<|", "").replace("|>", "")
