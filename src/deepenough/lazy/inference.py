"""Finished models in use: load a run, translate, continue text, and the scores of translations."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import sacrebleu
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria, StoppingCriteriaList

from deepenough.artifacts import parse_json, write_text
from deepenough.config import resolve, validate
from deepenough.data.batches import cut_by_tokens
from deepenough.data.corpus import read_input_lines, read_lines
from deepenough.data.tokenizer import check_text
from deepenough.data.translation import IGNORE_INDEX, EncodedPairs, Pair, encode_pairs
from deepenough.errors import UserError
from deepenough.hf import generation
from deepenough.lazy.config import (
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyGenerateConfig,
    TranslateConfig,
    train_config,
)
from deepenough.lazy.modeling import (
    LazyPreTrainedModel,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.runs import Metrics, Record, RunFolder, model_folder, read_config, read_records
from deepenough.training.checkpoint import load_finished
from deepenough.training.distributed import from_all, place_among

C = TypeVar("C")

WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
PASSAGES_AT_ONCE, MAX_WORD_TOKENS = 32, 24
"""Passages whose last words are written at once, and the most tokens of such a word."""
TRANSLATED_TOKENS = 4096
"""Source tokens translated at once."""

# -- finished runs ---------------------------------------------------------------------------------


class TrainedModel(NamedTuple):
    """A text-to-text or language model, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(run: str) -> TrainedModel:
    """Return the model of a finished run, or of a folder in Hugging Face form, ready for use."""
    instead = "not one of deepenough lazy: give the folder of deepenough lazy train"
    return TrainedModel(*load_finished(run, LazyPreTrainedModel, instead))


def load_translator(run: str) -> TrainedModel:
    """Return the model of a finished run that translates or executes programs."""
    instead = "which has no source to translate: give the folder of a translator"
    return TrainedModel(*load_finished(run, LazyTransformerForConditionalGeneration, instead))


def load_writer(run: str) -> TrainedModel:
    """Return the language model of a finished run."""
    instead = "which does not continue text: give the folder of a language model"
    return TrainedModel(*load_finished(run, LazyTransformerForCausalLM, instead))


def run_folder(run: str) -> RunFolder:
    """Return the folder of the run that a model belongs to, where it belongs to one."""
    return RunFolder(model_folder(run).parent)


def _trained_folder(run: str) -> RunFolder:
    folder = run_folder(run)
    if not folder.config.is_file():
        raise UserError(
            f"Nothing tells what the model in {run} was trained on: give the folder of a run."
        )
    return folder


def task_of(run: str) -> str:
    """Return what a run was trained for; translation where its settings do not tell."""
    settings = read_config(str(_trained_folder(run).path))
    if (method := settings.get("method")) not in (None, LanguageTrainConfig.METHOD):
        raise UserError(
            f"{run} is a run of deepenough {method}: give the folder of deepenough lazy train."
        )
    return train_config(settings.get("task")).task


def trained_with(config_class: type[C], run: str) -> C:
    """Return the settings that a run was trained with."""
    return resolve(config_class, _trained_folder(run).settings())


def keep_record(run: str, kind: str, values: dict[str, Any]) -> None:
    """Append to the run's records, at its last step, once; a bare model folder keeps none."""
    folder = run_folder(run)
    if not folder.metrics.is_file():
        return
    records, _ = read_records(folder.metrics)
    step = max((record.step for record in records), default=0)
    if not any(record.kind == kind and record.values == values for record in records):
        with folder.lock():
            Metrics(folder.metrics).append(Record(step, kind, values))


def write_beside(run: str, name: str, text: str) -> None:
    """Write a file into the folder of a run."""
    folder = run_folder(run)
    with folder.lock():
        write_text(folder.path / name, text)


# -- language --------------------------------------------------------------------------------------


def continue_text(config: LazyGenerateConfig) -> str:
    """Return a prompt and what the language model of a run writes after it."""
    options = validate(config).options
    model, tokenizer = load_writer(options.pop("run"))
    config.halting.check_for(model)
    options |= config.halting.halting()
    del options["halting"]
    is_run = run_folder(config.run).config.is_file()
    ends_lines = is_run and trained_with(LanguageTrainConfig, config.run).dataset.ends_lines
    if ends_lines:  # the end token is a line's end, and the text goes on behind it
        model.generation_config.eos_token_id = None
    longest = model.config.max_positions
    if len(tokenizer.encode(config.prompt)) + config.tokens > longest:
        raise UserError(
            f"The prompt and {config.tokens} tokens more are longer than the model's {longest} "
            "positions: shorten the prompt or ask for fewer tokens."
        )
    return generation.continue_text(model, tokenizer, ends_lines=ends_lines, **options)


def read_passages(file: str) -> list[Pair]:
    """Return the passages of a file, one a line or JSONL with the key `text`, as rest and word.

    Punctuation behind the last word is dropped.
    """
    found = []
    for number, line in enumerate(read_lines([Path(file)]), start=1):
        try:
            is_json = Path(file).suffix == ".jsonl" and line.strip()
            text = str(parse_json(line)["text"]) if is_json else line
            *_, _, last = WORD.finditer(text)
            found.append(Pair(" ".join(text[: last.start()].split()), last.group()))
        except (ValueError, KeyError) as error:
            if line.strip():
                raise UserError(
                    f"Line {number} of {file} is no passage of two words or more (in JSONL, under "
                    'the key "text"): correct or remove it.'
                ) from error
    if not found:
        raise UserError(f"{file} holds no passage: give one a line.")
    return found


@torch.inference_mode()
def last_words(writer: TrainedModel, rests: Sequence[str], length: int) -> list[str]:
    """Return the next word that a language model writes behind each text, greedily; "" for none.

    Of a text the last `length` tokens are read, as many as the model was trained to see at once.
    A word that the model goes on with from within the text's last one is none.
    """
    model, tokenizer = writer
    pad, found = tokenizer.pad_token_id, []
    for start in range(0, len(rests), PASSAGES_AT_ONCE):
        encoded = [
            torch.tensor(tokenizer.encode(rest, add_special_tokens=False)[-length:])
            for rest in rests[start : start + PASSAGES_AT_ONCE]
        ]
        ids = pad_sequence(encoded, True, pad, padding_side="left").to(model.device)
        mask = pad_sequence([torch.ones_like(row) for row in encoded], True, 0, "left")
        written = model.generate(
            ids, attention_mask=mask.to(ids.device), max_new_tokens=MAX_WORD_TOKENS, do_sample=False
        )
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        for text, rest in zip(texts, tokenizer.batch_decode(encoded), strict=True):
            words = (word for word in WORD.finditer(text) if word.start() >= len(rest))
            word = next(words, None)
            is_next = word is not None and not text[len(rest) : word.start()].strip()
            found.append(word.group() if word is not None and is_next else "")
    return found


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
    translator: TrainedModel, lines: Iterable[str], search: BeamSearchConfig, at_once: int = 32
) -> Iterator[str]:
    """Yield the translation of every line, in order; that of an empty line is empty."""
    if at_once < 1:
        raise UserError(f"rows must be at least 1: got {at_once}.")
    iterator = iter(lines)
    while chunk := list(islice(iterator, at_once)):
        encoded = encode_input(translator, [Pair(check_text(line, "A line"), "") for line in chunk])
        translations = translate_pairs(*translator, encoded, search)
        for line, translation in zip(chunk, translations, strict=True):
            yield translation if line.strip() else ""


def translate(config: TranslateConfig) -> Iterator[str]:
    """Return the translations of the lines of a file, or of standard input, as they come."""
    translator, lines = load_translator(config.run), read_input_lines(config.file)
    return translate_lines(translator, lines, config.search, config.rows)


def encode_input(translator: TrainedModel, pairs: Iterable[Pair]) -> EncodedPairs:
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
    total, num_tokens = 0.0, 0
    order = pairs.target.lengths.argsort(kind="stable")
    lengths = np.maximum(pairs.source.lengths, pairs.target.lengths)
    for rows in cut_by_tokens(order, lengths, batch_tokens)[rank::world]:
        batch = pairs.batch(rows.tolist(), model.device)
        tokens = int((batch["targets"] != IGNORE_INDEX).sum())
        total += float(model(**batch).plain_loss) * tokens
        num_tokens += tokens
    losses, counts = zip(*from_all(accelerator, (total, num_tokens)), strict=True)
    return {"loss": sum(losses) / sum(counts), "tokens": float(sum(counts))}
