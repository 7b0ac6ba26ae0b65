"""Measure finished models: quality, depth and cost, other steps and epsilons, a look inside.

Beside quality, a translator's evaluation measures the steps, FLOPs and seconds of the encoder. A
sweep repeats an evaluation for other numbers of steps than those of training (the paper's
"zero-shot inferring") and for tokens that halt. Every result is appended to the run's records as
soon as it is found, and a sweep that was interrupted goes on behind it. What values of `epsilon`
save beside other methods is for `deepenough compare`.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import sacrebleu
import torch
from torch import Tensor

from deepenough.artifacts import FinishedParts, files_of
from deepenough.config import validate
from deepenough.data.tokenizer import lowers_case
from deepenough.data.tokens import TokenFile, split_tokens
from deepenough.data.translation import EncodedPairs, Pair, encode_split, open_parallel
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.lazy.config import (
    ANGLE,
    CALL_OPTIONS,
    EPSILONS_RECORD,
    LANGUAGE,
    LAZY,
    PROGRAMS,
    STEPS_RECORD,
    TRANSLATION,
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyEvalConfig,
    ProgramTrainConfig,
    SweepConfig,
    TranslationTrainConfig,
)
from deepenough.lazy.inference import (
    TrainedModel,
    bleu,
    keep_record,
    last_words,
    load_translator,
    load_writer,
    read_passages,
    task_of,
    trained_with,
    translate_pairs,
    write_beside,
)
from deepenough.lazy.modeling import LazyTransformerForConditionalGeneration
from deepenough.lazy.programs import encode_programs, measure_programs, measured_programs
from deepenough.lazy.transition import step_similarity
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Interval,
    OperatingPoint,
    Scores,
    content_of,
    intervals_of,
    share_interval,
)
from deepenough.runs import model_folder
from deepenough.trace import DepthTrace
from deepenough.training.language import evaluate_language

TIMED_SENTENCES, NUM_TIMINGS = 32, 3
"""Sentences in a batch when the encoder is timed, and how often it is."""
COMPARED_SENTENCES = 128
BLEU_RESAMPLES = 1000
LENGTHS = (10, 20, 30, 40)
"""Most words of the sources in each group of which BLEU is told; the last has longer ones."""
SWEPT_STEPS = (2, 4, 6, 8, 9)
SAMPLED, SHARES = 32, (3 / 4, 3 / 5, 1 / 2)
"""Texts from which a sweep's epsilons are derived, and the shares of the steps left by each."""

# -- evaluation and sweeps -------------------------------------------------------------------------


class Measurement(NamedTuple):
    """A finished model and the data that it is to be measured on."""

    model: Any
    measure: Callable[[BeamSearchConfig], dict[str, Any]]
    """Returns figures and, as `hypotheses`, the texts that the model has written."""
    sample: dict[str, Tensor]
    """A batch of a few texts, as the model takes it."""


def open_measurement(config: LazyEvalConfig) -> tuple[str, Measurement]:
    """Return what a run was trained for, and its model and data; options of other tasks refused."""
    validate(config)
    task = task_of(config.run)
    config.check_task(task)
    openers = {TRANSLATION: _translation, PROGRAMS: _programs, LANGUAGE: _language}
    return task, openers[task](config)


def evaluate(config: LazyEvalConfig) -> dict[str, Any]:
    """Measure a run at its task, record the figures and return them; keep what the model wrote."""
    task, measurement = open_measurement(config)
    values = measurement.measure(config.search)
    texts = values.pop("hypotheses", None)
    keep_record(config.run, task, values)
    if texts is not None:
        lines = "".join(" ".join(text.splitlines()) + "\n" for text in texts)
        write_beside(config.run, "hypotheses.txt", lines)
    return values


def sweep(config: SweepConfig) -> Iterator[dict[str, Any]]:
    """Yield one measurement after another, record it in the run and add it to its table."""
    _, (model, measure, sample) = open_measurement(config)
    points = _swept(config, model, sample)
    for _, search in points:  # all are checked before the first is measured
        search.check_for(model)
    folder = model_folder(config.run)
    found: list[dict[str, Any]] = []
    with FinishedParts(folder.parent, "sweep", config, files_of(folder)) as parts:
        for number, (kind, search) in enumerate(points):
            values = parts.get(str(number), partial(measure, search))
            values.pop("hypotheses", None)
            found.append(values)
            keep_record(config.run, kind, values)
            write_beside(config.run, "sweep.csv", _csv(found))
            yield values


def _swept(
    config: SweepConfig, model: Any, sample: dict[str, Tensor]
) -> list[tuple[str, BeamSearchConfig]]:
    """Return the points of a sweep, each with the kind of its record."""
    has_source, epsilons = model.config.is_encoder_decoder, config.epsilons
    encoder_steps: Sequence[int | None] = SWEPT_STEPS if has_source else [None]
    if config.encoder_steps is not None:
        encoder_steps = config.encoder_steps
    if epsilons is None:
        epsilons = measured_epsilons(model, sample, config.search.halt_on)
    name = "epsilon" if has_source else "decoder_epsilon"
    found: list[tuple[str, dict[str, Any]]] = [
        (STEPS_RECORD, {"encoder_steps": encoder, "decoder_steps": decoder})
        for encoder in encoder_steps
        for decoder in config.decoder_steps
    ]
    found += [(EPSILONS_RECORD, {name: epsilon}) for epsilon in epsilons]
    if not found:
        raise UserError("The grid is empty: give some encoder_steps and decoder_steps.")
    return [(kind, replace(config.search, **setting)) for kind, setting in found]


@torch.inference_mode()
def measured_epsilons(
    model: Any, sample: dict[str, Tensor], halt_on: str | None = None
) -> list[float]:
    """Return epsilons at which tokens would make about `SHARES` of the steps; none without gates.

    With patience 1, and as if tokens that halt did not change what others do.
    """
    config = model.config
    if config.mechanism != LAZY:
        return []
    output = model(**sample, epsilon=0.0, decoder_epsilon=0.0, output_hidden_states=True)
    side = "encoder" if config.is_encoder_decoder else "decoder"
    change = output[f"{side}_gates"]
    if (halt_on or config.halt_on) == ANGLE:
        change = 1.0 - step_similarity(output[f"{side}_hidden_states"])
    real = sample.get("attention_mask", torch.ones_like(sample["input_ids"])).bool()
    # A token makes its first step, and each other one before which no change was below epsilon.
    lowest = exact(change.cummin(-1).values[real][:, :-1]).flatten()
    num_steps = change.shape[-1]
    shares = [max(0.0, share * num_steps - 1) / max(1, num_steps - 1) for share in SHARES]
    found = [float(lowest.quantile(1 - share)) for share in shares] if len(lowest) else []
    return sorted({float(f"{epsilon:.2g}") for epsilon in found if epsilon > 0.0})


def _csv(points: list[dict[str, Any]]) -> str:
    """Return measurements as a table, one a line; their nested parts are left out."""
    import pandas  # here, because most commands do not need it

    names = [name for name, value in points[0].items() if not isinstance(value, list | dict)]
    return pandas.DataFrame(points, dtype=object)[names].to_csv(index=False, lineterminator="\n")


# -- translation -----------------------------------------------------------------------------------


def _translation(config: LazyEvalConfig) -> Measurement:
    translator = load_translator(config.run)
    model, tokenizer = translator
    pairs = measured_pairs(config, translator).head(getattr(config, "sentences", None))
    references = [pair.target for pair in pairs.pairs]
    lowercase = lowers_case(tokenizer)

    def measure(search: BeamSearchConfig) -> dict[str, Any]:
        started = time.perf_counter()
        translations = translate_pairs(model, tokenizer, pairs, search)
        seconds = time.perf_counter() - started
        score = bleu(translations, references, lowercase)
        characters = sacrebleu.CHRF(lowercase=lowercase)
        values: dict[str, Any] = {"bleu": score.score, "signature": score.signature}
        values["chrf"] = float(characters.corpus_score(translations, [references]).score)
        values["chrf_signature"] = str(characters.get_signature())
        values |= _settings(model, search)
        values |= {"length_penalty": search.length_penalty, "length_formula": search.length_formula}
        values |= {"sentences": len(pairs), "seconds": seconds}
        values |= measure_encoder(model, pairs, search, NUM_TIMINGS)
        values |= {"split": config.split, "test": config.test}
        values["bleu_by_length"] = bleu_by_length(pairs.pairs, translations, lowercase)
        values["hypotheses"] = translations
        return values | intervals_of(bleu=bleu_interval(translations, references, lowercase))

    return Measurement(model, measure, pairs.batch(range(len(pairs))[:SAMPLED], model.device))


def measured_pairs(
    config: LazyEvalConfig, translator: TrainedModel, data: str | None = None
) -> EncodedPairs:
    """Return the pairs of the split, of `data` or of the text that the model was trained on."""
    trained = trained_with(TranslationTrainConfig, config.run)
    dataset = replace(trained.dataset, test=config.test or trained.dataset.test)
    text = open_parallel(data or trained.data, dataset)
    tokenizer, longest = translator.tokenizer, dataset.max_length
    return encode_split(text, config.split, tokenizer, longest, truncate=True)


def _settings(model: Any, search: BeamSearchConfig) -> dict[str, Any]:
    """Return how a model was run, for its record."""
    options = {name: getattr(model.config, name) for name in CALL_OPTIONS} | search.halting()
    return {"mechanism": model.config.mechanism, "beams": search.num_beams} | options


def bleu_by_length(
    pairs: Sequence[Pair], translations: Sequence[str], lowercase: bool = False
) -> list[dict[str, Any]]:
    """Return BLEU of sources of similar length, counted in words between spaces."""
    found, lengths = [], [len(pair.source.split()) for pair in pairs]
    for low, high in zip((0, *LENGTHS), (*LENGTHS, None), strict=True):
        rows = [row for row, num in enumerate(lengths) if low < num <= (high or math.inf)]
        if rows:
            texts, references = [translations[i] for i in rows], [pairs[i].target for i in rows]
            score = bleu(texts, references, lowercase).score
            words = f"{low + 1} to {high}" if high else f"above {low}"
            found.append({"source_words": words, "sentences": len(rows), "bleu": score})
    return found


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
    names = ("encoder_steps", "epsilon", "patience", "halt_on")
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


# -- programs --------------------------------------------------------------------------------------


def _programs(config: LazyEvalConfig) -> Measurement:
    model, tokenizer = load_translator(config.run)
    programs, dataset = measured_programs(config)
    programs = programs[: getattr(config, "sentences", None)]
    # Longer programs than in training need only more of the same position encodings.
    longest = 2 * dataset.max_length + 16
    model.config.max_positions = max(model.config.max_positions, longest)
    pairs = encode_programs(programs, tokenizer)

    def measure(search: BeamSearchConfig) -> dict[str, Any]:
        search = replace(search, beams=search.beams or 1)
        values = measure_programs(model, tokenizer, programs, search)
        values |= {"split": config.split, "length": dataset.length, "nesting": dataset.nesting}
        values |= {"programs": len(programs)} | _settings(model, search)
        values |= measure_encoder(model, pairs, search)
        right = round(values["exact"] * len(programs))
        return values | intervals_of(exact=share_interval(right, len(programs)))

    return Measurement(model, measure, pairs.batch(range(len(pairs))[:SAMPLED], model.device))


# -- language --------------------------------------------------------------------------------------


def _language(config: LazyEvalConfig) -> Measurement:
    if getattr(config, "sentences", None) is not None:
        raise UserError("A language model is measured on a whole text: leave out sentences.")
    writer = load_writer(config.run)
    model, dataset = writer.model, trained_with(LanguageTrainConfig, config.run).dataset
    tokens = measured_tokens(config, writer)
    passages = None if config.last_words is None else read_passages(config.last_words)
    names = ("decoder_steps", "decoder_epsilon", "patience", "halt_on")
    usual = {name: getattr(model.config, name) for name in names}

    def measure(search: BeamSearchConfig) -> dict[str, Any]:
        search.check_for(model)
        options = usual | search.halting()
        model.config.update(options)
        started = time.perf_counter()
        values: dict[str, Any] = dict(evaluate_language(model, tokens, dataset))
        values["seconds"] = time.perf_counter() - started
        values |= {"split": config.split, "mechanism": model.config.mechanism} | options
        if passages is None:
            return values
        words = last_words(writer, [passage.source for passage in passages], dataset.length)
        change = str.lower if lowers_case(writer.tokenizer) else str
        right = sum(word == change(told.target) for word, told in zip(words, passages, strict=True))
        accuracy = share_interval(right, len(passages))
        values["intervals"] |= intervals_of(last_word_accuracy=accuracy)["intervals"]
        values |= {"last_word_accuracy": accuracy.value, "passages": len(passages)}
        return values | {"hypotheses": words}

    ids = torch.from_numpy(tokens.ids[: dataset.length].astype("int64"))
    return Measurement(model, measure, {"input_ids": ids[None].to(model.device)})


def measured_tokens(config: LazyEvalConfig, writer: TrainedModel) -> TokenFile:
    """Return the tokens of the split, of the text that the model was trained on."""
    trained = trained_with(LanguageTrainConfig, config.run)
    dataset, tokenizer = trained.dataset, writer.tokenizer
    return split_tokens(trained.data, dataset, config.split, tokenizer)[0]


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
        trained, split = trained_with(TranslationTrainConfig, run), data.split or "test"
        pairs = measured_pairs(LazyEvalConfig(run, split), self.translator, data.data)
        kept, dataset = pairs.head(data.limit or COMPARED_SENTENCES), trained.dataset
        lowercase, name = lowers_case(self.translator.tokenizer), data.data or trained.data
        detail = {"sentences": len(kept), "languages": f"{dataset.source} to {dataset.target}"}
        detail |= {"lowercase": lowercase, "content": content_of(kept.pairs)}
        return kept, ComparedTask("translation", name, split, "sentence", "BLEU", True, detail)

    def _quality(self, texts: list[str]) -> Interval:
        return bleu_interval(texts, self.references, lowers_case(self.translator.tokenizer))

    def points(self) -> Sequence[OperatingPoint]:
        """Return all steps, fewer steps, and epsilons, the deepest first."""
        config, grid = self.translator.model.config, self.grid
        most = config.encoder_steps
        fewer = sorted({max(1, 2 * most // 3), max(1, most // 3)} - {most}, reverse=True)
        epsilons = config.default_epsilons() if grid.epsilon is None else grid.epsilon
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


class ProgramCandidate(TranslationCandidate):
    """A program executor in a comparison: an answer is right to the last digit, or wrong."""

    def _open(self, run: str, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
        split, seed = data.split or "test", trained_with(ProgramTrainConfig, run).train.seed
        programs, dataset = measured_programs(LazyEvalConfig(run, split))
        kept = programs[: data.limit or COMPARED_SENTENCES]
        pairs = encode_programs(kept, self.translator.tokenizer)
        # There is no file of programs: what they are drawn from identifies them.
        detail = {"programs": len(pairs), "seed": seed, **asdict(dataset)}
        task = ComparedTask("execution", PROGRAMS, split, "program", "exact match", True, detail)
        return pairs, task

    def _quality(self, texts: list[str]) -> Interval:
        right = sum(made == told for made, told in zip(texts, self.references, strict=True))
        return share_interval(right, len(texts))


def open_candidate(run: str, name: str, data: ComparedData) -> TranslationCandidate:
    """Return a finished run as a comparison measures it."""
    candidates = {TRANSLATION: TranslationCandidate, PROGRAMS: ProgramCandidate}
    task = task_of(run)
    if task not in candidates:
        raise UserError(
            f"{run} was trained on {task}, which has no operating points to compare: leave it out."
        )
    return candidates[task](run, name, data)


def _mean_steps(traces: Sequence[DepthTrace]) -> float:
    """Return how many steps ran for a real token, on average; padding has no FLOPs."""
    ran = sum(int(trace.ran.sum()) for trace in traces)
    real = sum(int(torch.count_nonzero(trace.flops)) for trace in traces)
    return ran / real if real else 0.0
