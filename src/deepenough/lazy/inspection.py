"""A look inside a finished model: what its figures show of one sentence, program or text."""

from typing import Any

import torch
from torch import Tensor

from deepenough.config import validate
from deepenough.data.tokenizer import check_text
from deepenough.data.translation import Pair
from deepenough.errors import UserError
from deepenough.figure import Inspector, Run, Section
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
from deepenough.lazy.figures import tokens_figure
from deepenough.lazy.inference import (
    TrainedModel,
    encode_input,
    keep_record,
    load_model,
    load_translator,
    task_of,
    trained_with,
    translate_lines,
    translate_pairs,
)
from deepenough.lazy.programs import measured_programs
from deepenough.lazy.transition import step_cka, step_similarity
from deepenough.runs import Record

EXAMPLE = "A dog runs on the beach."


@torch.inference_mode()
def inspect_run(config: LazyPlotConfig) -> None:
    """Record how much each token of a text still changes at each step, for `lazy plot` to draw."""
    validate(config)
    if config.source is not None and not config.source.strip():
        raise UserError("The source is empty: give a sentence, a program or a text.")
    loaded = load_model(config.run)
    is_pair = loaded.model.config.is_encoder_decoder
    text = _inspected_pair(config, loaded) if is_pair else _inspected_text(config, loaded)
    keep_record(config.run, TOKENS_RECORD, inspect(loaded, text, config.epsilon, config.halt_on))


@torch.inference_mode()
def inspect(
    loaded: TrainedModel,
    text: Pair | Tensor,
    epsilon: float | None = None,
    halt_on: Any = None,
) -> dict[str, Any]:
    """Return how much each token of a pair, or of ids `[1, T]`, still changes at each step.

    Of each side: gates, the squared cosine between a token's consecutive states, that of the
    sentence's mean, and the CKA of all its states at any two steps. Of the source, or of a language
    model's text, also the steps that its tokens make at `epsilon`.
    """
    model, tokenizer = loaded
    if isinstance(text, Pair):
        values: dict[str, Any] = {"source": text.source, "target": text.target}
        batch = encode_input(loaded, [text]).batch([0], model.device)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["targets"])
        sides = {"encoder": batch["input_ids"], "decoder": decoder_ids}
        halting = "epsilon"
    else:
        values = {"source": tokenizer.decode(text[0], skip_special_tokens=True)}
        batch, sides = {"input_ids": text}, {"decoder": text}
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
        values["halt_on"] = halt_on or model.config.halt_on
        values["epsilon"] = epsilon or model.config.default_epsilons(halt_on)[-1]
        halted = model(**batch, **{halting: values["epsilon"]}, halt_on=halt_on)
        side, trace = next(iter(sides)), halted.encoder_trace or halted.trace
        values[side]["depth"] = trace.depth[0].tolist()
    return values


def open_inspector(run: str) -> Inspector:
    """Return the translator of a finished run as it is tried on sentences, at any epsilon."""
    translator = load_translator(run)
    epsilons = translator.model.config.default_epsilons()

    def look(text: str, epsilon: float) -> Section:
        if not check_text(text).strip():
            raise UserError("The source is empty: give a sentence to translate.")
        search = BeamSearchConfig(epsilon=epsilon if epsilons else None)
        (target,) = translate_lines(translator, [text], search)
        values = inspect(translator, Pair(text, target), epsilon)
        figure = tokens_figure(Run(run, [Record(0, TOKENS_RECORD, values)]))
        findings = [target]
        depth, num_steps = values["encoder"].get("depth"), len(values["encoder"]["sentence"])
        if depth is not None:
            halted = sum(steps < num_steps for steps in depth)
            findings.append(
                f"{halted} of {len(depth)} source tokens halt before step {num_steps}; on average "
                f"a token makes {sum(depth) / len(depth):.1f} steps."
            )
        return Section("Translate", findings=findings, figures=[figure] if figure else [])

    dial = "Epsilon: a token halts once it changes less than this" if epsilons else ""
    usual, high = (epsilons[-1], 4 * epsilons[-1]) if epsilons else (0.0, 1.0)
    return Inspector(look, EXAMPLE, dial, high / 400, high, usual)


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
