"""Use and measure finished models: translations, BLEU, depth and cost, perplexity, pictures.

Beside quality, a translator's evaluation measures the steps, FLOPs and seconds of the encoder. A
sweep repeats it for other numbers of steps than those of training (the paper's "zero-shot
inferring"). Every result is appended to the run's records as soon as it is found, and a sweep that
was interrupted goes on behind it. What values of `epsilon` save is for `deepenough compare`.

What concerns programs alone is in `programs.py`, which builds on this module.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import sacrebleu
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from deepenough.artifacts import FinishedParts, files_of
from deepenough.config import resolve, validate
from deepenough.data.batches import cut_by_tokens
from deepenough.data.tokenizer import check_text, load_tokenizer, lowers_case
from deepenough.data.tokens import split_tokens
from deepenough.data.translation import (
    IGNORE_INDEX,
    EncodedPairs,
    Pair,
    encode_pairs,
    open_parallel,
)
from deepenough.errors import UserError
from deepenough.hf.loading import from_pretrained
from deepenough.lazy.config import (
    CALL_OPTIONS,
    LANGUAGE,
    LAZY,
    PROGRAMS,
    STEPS_RECORD,
    TOKENS_RECORD,
    TRANSLATION,
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyEvalConfig,
    LazyPlotConfig,
    LazyTransformerConfig,
    SweepConfig,
    TranslationTrainConfig,
    train_config,
)
from deepenough.lazy.modeling import (
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.lazy.transition import step_similarity
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Interval,
    OperatingPoint,
    Scores,
    content_of,
    intervals_of,
)
from deepenough.runs import Metrics, Record, RunFolder, model_folder, read_config, read_records
from deepenough.trace import DepthTrace
from deepenough.training.distributed import from_all, place_among
from deepenough.training.language import evaluate_language as language_quality
from deepenough.training.logging import without_bars

C = TypeVar("C")

TRANSLATED_TOKENS = 4096
"""Source tokens translated at once."""
TIMED_SENTENCES, NUM_TIMINGS = 32, 3
"""Sentences in a batch when the encoder is timed, and how often it is."""
COMPARED_SENTENCES = 128
BLEU_RESAMPLES = 1000

# -- finished runs ---------------------------------------------------------------------------------


class Translator(NamedTuple):
    """A text-to-text model and its tokenizer."""

    model: LazyTransformerForConditionalGeneration
    tokenizer: Any


def load_translator(run: str) -> Translator:
    """Return the model of a finished run, or of a folder in Hugging Face form, ready for use."""
    model = _load(LazyTransformerForConditionalGeneration, run)
    return Translator(model, load_tokenizer(str(model_folder(run))))


def _load(model_class: type, run: str) -> Any:
    place = str(model_folder(run))
    options: dict[str, Any] = {"name": run, "trust_remote_code": None}
    _check_method(run)
    config = from_pretrained(LazyTransformerConfig, place, "config", **options)
    # transformers would fill what a language model lacks with new weights.
    is_causal = LazyTransformerForCausalLM.__name__ in (config.architectures or ())
    if is_causal and model_class is not LazyTransformerForCausalLM:
        raise UserError(
            f"The model in {run} is a language model, which has no source to translate: "
            "give the folder of a translator."
        )
    with without_bars():
        return from_pretrained(model_class, place, "model", **options)


def _check_method(run: str) -> None:
    """Refuse the run of another method, whose weights transformers would replace by new ones."""
    folder = RunFolder(model_folder(run).parent)
    method = read_config(str(folder.path)).get("method") if folder.config.is_file() else None
    if method not in (None, LanguageTrainConfig.METHOD):
        raise UserError(
            f"{run} is a run of deepenough {method}: give the folder of deepenough lazy train."
        )


def _trained_folder(run: str) -> RunFolder:
    folder = RunFolder(model_folder(run).parent)
    if not folder.config.is_file():
        raise UserError(
            f"Nothing tells what the model in {run} was trained on: give the folder of a run."
        )
    return folder


def task_of(run: str) -> str:
    """Return what a run was trained for; translation where its settings do not tell."""
    _check_method(run)
    return train_config(read_config(str(_trained_folder(run).path)).get("task")).task


def trained_with(config_class: type[C], run: str) -> C:
    """Return the settings that a run was trained with."""
    return resolve(config_class, _trained_folder(run).settings())


def keep_record(run: str, kind: str, values: dict[str, Any]) -> None:
    """Append to the run's records, at its last step, once; a bare model folder keeps none."""
    folder = RunFolder(model_folder(run).parent)
    if not folder.metrics.is_file():
        return
    records, _ = read_records(folder.metrics)
    step = max((record.step for record in records), default=0)
    if not any(record.kind == kind and record.values == values for record in records):
        with folder.lock():
            Metrics(folder.metrics).append(Record(step, kind, values))


# -- search and scores -----------------------------------------------------------------------------


@torch.inference_mode()
def translate_pairs(
    model: LazyTransformerForConditionalGeneration,
    tokenizer: Any,
    pairs: EncodedPairs,
    search: BeamSearchConfig,
    accelerator: Accelerator | None = None,
) -> list[str]:
    """Return the translation of every source, in order; processes share the batches."""
    search.check_for(model)
    rank, world = place_among(accelerator)
    lengths = pairs.source.lengths
    # Similar lengths together, longest first: memory that suffices at first suffices always.
    order = np.argsort(-lengths, kind="stable")
    batches = cut_by_tokens(order, lengths, max(TRANSLATED_TOKENS, int(lengths.max())))
    translated: list[tuple[int, str]] = []
    for rows in batches[rank::world]:
        batch = pairs.batch(rows.tolist(), model.device)
        # A translation may be longer than its source, but hardly twice as long.
        limits = (2 * batch["attention_mask"].sum(1) + 10).clamp(max=model.config.max_positions - 1)
        written = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=int(limits.max()),
            stopping_criteria=StoppingCriteriaList([_LengthLimits(limits)]),
            **search.generation(),
        )
        texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
        translated += zip(rows.tolist(), (text.strip() for text in texts), strict=True)
    found = dict(chain.from_iterable(from_all(accelerator, translated)))
    return [found[row] for row in range(len(pairs))]


class _LengthLimits(StoppingCriteria):
    """A limit for each sentence, so that a translation does not depend on its batch."""

    def __init__(self, limits_B: Tensor) -> None:
        self.limits = limits_B

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        # The beams of a sentence are neighbouring rows; the first token is the start token.
        num_beams = len(input_ids) // len(self.limits)
        return self.limits.repeat_interleave(num_beams) <= input_ids.shape[1] - 1


def translate_lines(
    translator: Translator, lines: Iterable[str], search: BeamSearchConfig, at_once: int = 32
) -> Iterator[str]:
    """Yield the translation of every line, in order; that of an empty line is empty."""
    if at_once < 1:
        raise UserError(f"rows must be at least 1: got {at_once}.")
    iterator = iter(lines)
    while chunk := list(islice(iterator, at_once)):
        encoded = encode_input(translator, [Pair(check_text(line, "A line"), "") for line in chunk])
        for line, translation in zip(
            chunk, translate_pairs(*translator, encoded, search), strict=True
        ):
            yield translation if line.strip() else ""


def encode_input(translator: Translator, pairs: Iterable[Pair]) -> EncodedPairs:
    """Return pairs as ids, cut so that a translation twice as long still has positions."""
    limit = max(2, (translator.model.config.max_positions - 16) // 2)
    return encode_pairs(pairs, translator.tokenizer, limit, "input", truncate=True)


class Bleu(NamedTuple):
    """Corpus BLEU and sacrebleu's signature of how it was computed."""

    score: float
    signature: str


def bleu(translations: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """Return corpus BLEU of detokenized text; sacrebleu tokenizes it itself.

    `lowercase` is for models that write no capitals; the signature says so (`case:lc`).
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


@torch.inference_mode()
def plain_loss(
    model: LazyTransformerForConditionalGeneration,
    pairs: EncodedPairs,
    batch_tokens: int,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Return the mean loss per target token and their number; processes share the batches."""
    rank, world = place_among(accelerator)
    total = 0.0
    num_tokens = 0
    order = pairs.target.lengths.argsort(kind="stable")
    lengths = np.maximum(pairs.source.lengths, pairs.target.lengths)
    for rows in cut_by_tokens(order, lengths, batch_tokens)[rank::world]:
        batch = pairs.batch(rows.tolist(), model.device)
        tokens = int((batch["targets"] != IGNORE_INDEX).sum())
        total += float(model(**batch).plain_loss) * tokens
        num_tokens += tokens
    losses, counts = zip(*from_all(accelerator, (total, num_tokens)), strict=True)
    return {"loss": sum(losses) / sum(counts), "tokens": float(sum(counts))}


# -- translation -----------------------------------------------------------------------------------


def evaluate_translation(config: LazyEvalConfig) -> dict[str, Any]:
    """Measure BLEU, depth and cost on a split, record them in the run and return them."""
    validate(config)
    translator = load_translator(config.run)
    pairs = measured_pairs(config, translator)
    values = _measure(config, translator, pairs, config.search)
    keep_record(config.run, TRANSLATION, values)
    return values


def sweep(config: SweepConfig) -> Iterator[dict[str, Any]]:
    """Yield one measurement after another, and record it in the run."""
    validate(config)
    if (task := task_of(config.run)) != TRANSLATION:
        raise UserError(
            f"{config.run} was trained on {task}, but a sweep measures BLEU: give the run of a "
            "translator."
        )
    translator = load_translator(config.run)
    searches = [
        replace(config.search, encoder_steps=encoder, decoder_steps=decoder)
        for encoder in config.encoder_steps
        for decoder in config.decoder_steps
    ]
    if not searches:
        raise UserError("The grid is empty: give some encoder_steps and decoder_steps.")
    for search in searches:  # all are checked before the first is measured
        search.check_for(translator.model)
    pairs = measured_pairs(config, translator).head(config.sentences)
    model = model_folder(config.run)
    with FinishedParts(model.parent, "sweep", config, files_of(model)) as parts:
        for number, search in enumerate(searches):
            measure = partial(_measure, config, translator, pairs, search)
            values = parts.get(str(number), measure)
            keep_record(config.run, STEPS_RECORD, values)
            yield values


def measured_pairs(config: LazyEvalConfig, translator: Translator) -> EncodedPairs:
    """Return the pairs of the split, from the text that the model was trained on."""
    trained = trained_with(TranslationTrainConfig, config.run)
    dataset = replace(trained.dataset, test=config.test or trained.dataset.test)
    text = open_parallel(trained.data, dataset)
    name = f"{text.name}, {config.split}"
    return encode_pairs(
        text.pairs(config.split), translator.tokenizer, dataset.max_length, name, truncate=True
    )


def _measure(
    config: LazyEvalConfig, translator: Translator, pairs: EncodedPairs, search: BeamSearchConfig
) -> dict[str, Any]:
    """Return BLEU and seconds of the search, and what the encoder did."""
    model = translator.model
    started = time.perf_counter()
    translations = translate_pairs(*translator, pairs, search)
    seconds = time.perf_counter() - started
    references = [pair.target for pair in pairs.pairs]
    lowercase = lowers_case(translator.tokenizer)
    score = bleu(translations, references, lowercase)
    values: dict[str, Any] = {"bleu": score.score, "signature": score.signature}
    values |= {"mechanism": model.config.mechanism, "beams": search.num_beams}
    values |= {name: getattr(model.config, name) for name in CALL_OPTIONS} | search.halting()
    values |= {"sentences": len(pairs), "seconds": seconds}
    values |= measure_encoder(model, pairs, search, NUM_TIMINGS)
    values |= {"split": config.split, "test": config.test}
    return values | intervals_of(bleu=bleu_interval(translations, references, lowercase))


def bleu_interval(texts: list[str], references: list[str], lowercase: bool) -> Interval:
    """Return BLEU with sacrebleu's own bootstrap over sentences."""
    metric = sacrebleu.BLEU(lowercase=lowercase)
    score: Any = metric.corpus_score(texts, [references], n_bootstrap=BLEU_RESAMPLES)
    value = float(score.score)
    # sacrebleu gives the middle of the resampled scores and half the width of their 95 %.
    middle, half = float(score._mean), float(score._ci)
    return Interval(value, min(value, middle - half), max(value, middle + half))


@torch.inference_mode()
def measure_encoder(
    model: LazyTransformerForConditionalGeneration,
    pairs: EncodedPairs,
    search: BeamSearchConfig,
    num_timings: int = 1,
) -> dict[str, float]:
    """Return the encoder's mean steps per source token, its FLOPs, and the fastest of its times."""
    names = ("encoder_steps", "epsilon", "patience")
    arguments = {name: value for name, value in search.halting().items() if name in names}
    order = pairs.source.lengths.argsort(kind="stable")[::-1]
    size = TIMED_SENTENCES
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    batches = [pairs.batch(part.tolist(), model.device) for part in parts]
    model.encoder(batches[0]["input_ids"], batches[0]["attention_mask"], **arguments)  # warm-up
    seconds = float("inf")
    for _ in range(num_timings):
        started = time.perf_counter()
        traces: list[DepthTrace] = [
            model.encoder(batch["input_ids"], batch["attention_mask"], **arguments).trace
            for batch in batches
        ]
        seconds = min(seconds, time.perf_counter() - started)
    steps = torch.cat([trace.ran.sum((0, 1)) for trace in traces]).sum()
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    return {
        "encoder_depth": float(steps) / tokens,
        "encoder_flops": sum(trace.total_flops for trace in traces),
        "encoder_seconds": seconds,
    }


# -- language --------------------------------------------------------------------------------------


def evaluate_language(config: LazyEvalConfig) -> dict[str, Any]:
    """Measure perplexity, bits per byte and FLOPs per token; record and return them."""
    validate(config)
    model: Any = _load(LazyTransformerForCausalLM, config.run)
    for name, value in config.search.halting().items():
        setattr(model.config, name, value)
    trained = trained_with(LanguageTrainConfig, config.run)
    tokenizer = load_tokenizer(str(model_folder(config.run)))
    dataset = trained.dataset
    tokens, _ = split_tokens(trained.data, dataset, config.split, tokenizer, dataset.ends_lines)
    started = time.perf_counter()
    values: dict[str, Any] = dict(language_quality(model, tokens, dataset))
    values["seconds"] = time.perf_counter() - started
    values |= {"split": config.split, "mechanism": model.config.mechanism}
    names = ("decoder_steps", "decoder_epsilon", "patience")
    values |= {name: getattr(model.config, name) for name in names}
    keep_record(config.run, LANGUAGE, values)
    return values


# -- a look inside ---------------------------------------------------------------------------------


@torch.inference_mode()
def inspect_run(config: LazyPlotConfig) -> None:
    """Record how much each token of a pair still changes at each step, for `lazy plot` to draw.

    Of both sides: gates, the squared cosine between a token's consecutive states, and that of the
    sentence's mean. Of the source also the steps that its tokens make at `epsilon`.
    """
    validate(config)
    translator = load_translator(config.run)
    model, tokenizer = translator
    pair = _inspected_pair(config, translator)
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
            "sentence": step_similarity([state.mean(1) for state in states])[0].tolist(),
        }
        if gates is not None:
            values[side]["gates"] = gates[0].tolist()
    if model.config.mechanism == LAZY:
        values["epsilon"] = config.epsilon or model.config.default_epsilons[-1]
        halting = model.encoder(batch["input_ids"], epsilon=values["epsilon"])
        values["encoder"]["depth"] = halting.trace.depth[0].tolist()
    keep_record(config.run, TOKENS_RECORD, values)


def _inspected_pair(config: LazyPlotConfig, translator: Translator) -> Pair:
    """Return the pair to look at: the one given, or one of the split."""
    if config.source is None:
        measured = LazyEvalConfig(config.run)
        if task_of(config.run) == PROGRAMS:
            from deepenough.lazy.programs import measured_programs

            pairs = [Pair(each.source, each.target) for each in measured_programs(measured)[0]]
        else:
            pairs = measured_pairs(measured, translator).pairs
        if config.sentence >= len(pairs):
            raise UserError(
                f"The test split has {len(pairs)} pairs, counted from 0: got {config.sentence}."
            )
        return pairs[config.sentence]
    if not config.source.strip():
        raise UserError("The source is empty: give a sentence, or a program.")
    encoded = encode_input(translator, [Pair(config.source, "")])
    return Pair(config.source, translate_pairs(*translator, encoded, BeamSearchConfig())[0])


def _readable(piece: str) -> str:
    """Return a piece as people read it: a space where a word begins, no brackets of specials."""
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").replace("<|", "").replace("|>", "")


# -- comparison ------------------------------------------------------------------------------------


Answers = tuple[list[str], list[DepthTrace], list[DepthTrace]]
"""Texts of one pass over the sentences, with the traces of source and target."""


class TranslationCandidate:
    """A translator in a comparison: BLEU over epsilons and steps.

    The traces of encoder and decoder are captured as the search calls them; layers are the steps of
    a source token plus those of a target token, each on average. Padding costs nothing in a trace,
    but torch's counter counts it.
    """

    def __init__(self, run: str, name: str, data: ComparedData) -> None:
        self.name, self.path, self.grid = name, run, data.grid
        self.translator = load_translator(run)
        self.mechanism = str(self.translator.model.config.mechanism)
        self.pairs, self.task = self._open(run, data)
        self.references = [pair.target for pair in self.pairs.pairs]

    def _open(self, run: str, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
        trained, tokenizer = trained_with(TranslationTrainConfig, run), self.translator.tokenizer
        dataset = trained.dataset
        text, split = open_parallel(data.data or trained.data, dataset), data.split or "test"
        name = f"{text.name}, {split}"
        pairs = encode_pairs(text.pairs(split), tokenizer, dataset.max_length, name, truncate=True)
        kept = pairs.head(min(len(pairs), data.limit or COMPARED_SENTENCES))
        detail = {"sentences": len(kept), "languages": f"{dataset.source} to {dataset.target}"}
        detail |= {"lowercase": lowers_case(tokenizer), "content": content_of(kept.pairs)}
        return kept, ComparedTask("translation", text.name, split, "sentence", "BLEU", True, detail)

    def _quality(self, texts: list[str]) -> Interval:
        lowercase = lowers_case(self.translator.tokenizer)
        return bleu_interval(texts, self.references, lowercase)

    def points(self) -> Sequence[OperatingPoint]:
        """Return all steps, fewer steps, and epsilons, the deepest first."""
        config, grid = self.translator.model.config, self.grid
        most = config.encoder_steps
        fewer = sorted({max(1, 2 * most // 3), max(1, most // 3)} - {most}, reverse=True)
        epsilons = config.default_epsilons if grid.epsilon is None else grid.epsilon
        found: list[tuple[str, dict[str, Any], str]] = [("all steps", {}, "")]
        for steps in fewer if grid.steps is None else grid.steps:
            name = f"{steps} step{'s' * (steps > 1)}"
            found.append((name, {"encoder_steps": steps}, "fixed depth"))
        for value in epsilons if self.mechanism == LAZY else ():
            found.append((f"ε {value:g}", {"epsilon": value}, ""))
        points = []
        for name, settings, mechanism in found:
            BeamSearchConfig(**settings).check_for(self.translator.model)
            command = f"deepenough lazy eval {shlex.quote(self.path)} --search.beams 1"
            command += "".join(f" --search.{key} {value:g}" for key, value in settings.items())
            points.append(OperatingPoint(name, settings, mechanism, command))
        return points

    def run(self, point: OperatingPoint) -> Answers:
        """Translate all sources at an operating point; this is what is timed."""
        model = self.translator.model
        source: list[DepthTrace] = []
        target: list[DepthTrace] = []
        hooks = [
            model.encoder.register_forward_hook(lambda *call: source.append(call[2].trace)),
            model.register_forward_hook(lambda *call: target.append(call[2].trace)),
        ]
        search = BeamSearchConfig(beams=1, **dict(point.settings))
        try:
            texts = translate_pairs(*self.translator, self.pairs, search)
        finally:
            for hook in hooks:
                hook.remove()
        return texts, source, target

    def judge(self, point: OperatingPoint, answers: Answers) -> Scores:
        """Return the quality and cost of what `run` returned."""
        texts, source, target = answers
        flops = sum(trace.total_flops for trace in source + target)
        layers = _mean_steps(source) + _mean_steps(target)
        return Scores(self._quality(texts), len(texts), layers, flops)


def open_candidate(run: str, name: str, data: ComparedData) -> TranslationCandidate:
    """Return a finished run as a comparison measures it."""
    task = task_of(run)
    if task == TRANSLATION:
        return TranslationCandidate(run, name, data)
    if task == PROGRAMS:
        from deepenough.lazy.programs import ProgramCandidate

        return ProgramCandidate(run, name, data)
    raise UserError(
        f"{run} was trained on {task}, which has no operating points to compare: leave it out."
    )


def _mean_steps(traces: Sequence[DepthTrace]) -> float:
    """Return how many steps ran for a real token, on average; padding has no FLOPs."""
    ran = sum(int(trace.ran.sum()) for trace in traces)
    real = sum(int(torch.count_nonzero(trace.flops)) for trace in traces)
    return ran / real if real else 0.0
