"""Use of a finished translator: translate lines as they come, measure BLEU, depth and cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from deepenough.config import resolve
from deepenough.data.tokenizer import load_tokenizer, lowers_case
from deepenough.data.translation import Pair, TranslationData, open_parallel
from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.errors import UserError
from deepenough.lazy import (
    LazyTransformerConfig,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.lazy.training import LazyTraining
from deepenough.lazy.translate_score import SearchSettings, bleu, translate_pairs
from deepenough.runs import Metrics, Record, RunFolder, model_folder, read_records
from deepenough.trace import DepthTrace
from deepenough.training.logging import without_bars

EVALUATION = "translation"
"""Kind of the records that tell BLEU, depth and cost of one setting."""
ENCODER_ARGUMENTS = ("encoder_steps", "epsilon", "patience")
ROUNDS = 3
"""Times that the encoder is timed for a record."""


class Translator(NamedTuple):
    model: LazyTransformerForConditionalGeneration
    tokenizer: Any


def load_translator(folder: str) -> Translator:
    """The model of a finished run, or of a folder in Hugging Face form, ready for use."""
    path = model_folder(folder)
    try:
        config = LazyTransformerConfig.from_pretrained(path)
        # transformers would fill what a language model lacks with new weights.
        if LazyTransformerForCausalLM.__name__ in (config.architectures or ()):
            raise UserError(
                f"The model in {folder} is a language model, which has no source to translate: "
                "give the folder of a translator."
            )
        with without_bars():
            model = LazyTransformerForConditionalGeneration.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"The translator in {folder} cannot be loaded: {reason}.") from error
    return Translator(model.eval(), load_tokenizer(str(path)))


def translate_lines(
    translator: Translator, lines: Iterable[str], search: SearchSettings, at_once: int = 32
) -> Iterator[str]:
    """The translation of every line, in order; of an empty one an empty one."""
    if at_once < 1:
        raise UserError(f"rows must be at least 1: got {at_once}.")
    limit = source_limit(translator.model)
    iterator = iter(lines)
    while chunk := list(islice(iterator, at_once)):
        full = [line for line in chunk if line.strip()]
        made: Iterator[str] = iter(())
        if full:
            pairs = [Pair(line, "") for line in full]
            encoded = encode_pairs(pairs, translator.tokenizer, limit, "input", keep=True)
            made = iter(translate_pairs(*translator, encoded, search))
        for line in chunk:
            yield next(made) if line.strip() else ""


def source_limit(model: LazyTransformerForConditionalGeneration) -> int:
    """Tokens of a source at most, so that a translation twice as long still has positions."""
    return max(2, (model.config.max_positions - 16) // 2)


@dataclass
class LazyEvaluation:
    """Measure a translator."""

    run: str
    """Folder of a finished training."""

    split: str = "test"
    """Split to measure on: test or valid."""

    test: str | None = None
    """Other test files of the same folder, such as test_2017_flickr; by default the training's."""

    batch_size: int = 32
    """Sentences in one batch when the encoder is timed."""

    search: SearchSettings = field(default_factory=SearchSettings)

    def check(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1: got {self.batch_size}.")
        if self.test is not None and self.split != "test":
            raise UserError(
                f"test names other test files, but the {self.split} split was asked for: leave one "
                "of them out."
            )


def evaluate(settings: LazyEvaluation) -> dict[str, Any]:
    """BLEU, depth and cost on a split; recorded in the run."""
    settings.check()
    translator = load_translator(settings.run)
    pairs = measured_pairs(settings, translator)
    values = measure(translator, pairs, settings.search, settings.batch_size)
    values |= {"split": settings.split, "test": settings.test}
    keep_record(settings.run, EVALUATION, values)
    return values


def measured_pairs(settings: LazyEvaluation, translator: Translator) -> EncodedPairs:
    """The pairs of the split, of the text that the model was trained on."""
    data = trained_on(settings.run)
    if settings.test is not None:
        data = replace(data, test=settings.test)
    text = open_parallel(data)
    name = f"{text.name}, {settings.split}"
    return encode_pairs(
        text.pairs(settings.split), translator.tokenizer, data.max_length, name, keep=True
    )


def measure(
    translator: Translator, pairs: EncodedPairs, search: SearchSettings, batch_size: int
) -> dict[str, Any]:
    """BLEU and seconds of the search; steps, FLOPs and seconds of the encoder."""
    config = translator.model.config
    started = time.perf_counter()
    translations = translate_pairs(*translator, pairs, search)
    seconds = time.perf_counter() - started
    references = [pair.target for pair in pairs.pairs]
    score = bleu(translations, references, lowers_case(translator.tokenizer))
    chosen = {name: value for name, value in asdict(search).items() if value is not None}
    names = ("encoder_steps", "decoder_steps", "epsilon", "decoder_epsilon", "patience")
    setting = {name: chosen.get(name, getattr(config, name)) for name in names}
    values: dict[str, Any] = {"bleu": score.score, "signature": score.signature}
    values |= {"mechanism": config.mechanism, "beams": search.beams, **setting}
    values |= {"sentences": len(pairs), "seconds": seconds}
    return values | measure_encoder(translator.model, pairs, search, batch_size, rounds=ROUNDS)


@torch.inference_mode()
def measure_encoder(
    model: LazyTransformerForConditionalGeneration,
    pairs: EncodedPairs,
    search: SearchSettings,
    batch_size: int,
    rounds: int = 1,
) -> dict[str, float]:
    """Mean steps of a source token, FLOPs of all, and the seconds they took in such batches, the
    fastest of so many rounds."""
    arguments = {k: v for k, v in search.arguments().items() if k in ENCODER_ARGUMENTS}
    order = pairs.source.lengths.argsort(kind="stable")[::-1]
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches = [pairs.batch(part.tolist(), model.device) for part in parts]
    model.encoder(batches[0]["input_ids"], batches[0]["attention_mask"], **arguments)  # warm-up
    seconds = float("inf")
    for _ in range(rounds):
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


def keep_record(run: str, kind: str, values: dict[str, Any]) -> None:
    """Append to the run's records, at its last step; a bare model folder keeps none."""
    folder = RunFolder(model_folder(run).parent)
    if not folder.metrics.is_file():
        return
    records, _ = read_records(folder.metrics)
    step = max((record.step for record in records), default=0)
    Metrics(folder.metrics).append(Record(step, kind, values))


def trained_on(run: str) -> TranslationData:
    """The settings of the text that a run was trained on."""
    folder = RunFolder(model_folder(run).parent)
    if not folder.config.is_file():
        raise UserError(
            f"Nothing tells what the model in {run} was trained on: give the folder of a run."
        )
    return resolve(LazyTraining, folder.config).data
