"""Lazy Transformers from text to text as candidates: BLEU or exact match, over epsilons and steps.

What they were trained on tells which: pairs of sentences, or programs and what these print.

The traces of encoder and decoder are caught as the search calls them; layers are the steps of a
source token and those of a token of the translation, each on average, added. Padding costs nothing
in a trace, but torch's counter counts it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sacrebleu
import torch

from deepenough.config import resolve
from deepenough.data.tokenizer import lowers_case
from deepenough.data.translation import TranslationData, open_parallel
from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.errors import UserError
from deepenough.lazy.evaluation import load_translator
from deepenough.lazy.programs_pairs import held_out_pairs
from deepenough.lazy.translate_score import SearchSettings, translate_pairs
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Entry,
    Interval,
    OperatingPoint,
    Scores,
    content_of,
    share_interval,
)
from deepenough.runs import model_folder, read_config, read_section
from deepenough.trace import DepthTrace

SENTENCES = 128
RESAMPLES = 1000


@dataclass
class Translations:
    """One pass over the sentences."""

    texts: list[str] = field(default_factory=list)
    source: list[DepthTrace] = field(default_factory=list)
    target: list[DepthTrace] = field(default_factory=list)


class TranslationCandidate:
    def __init__(self, entry: Entry, name: str, data: ComparedData) -> None:
        self.name, self.entry = name, entry
        self.translator = load_translator(entry.run)
        self.mechanism = str(self.translator.model.config.mechanism)
        self.pairs, self.task = self._open(entry.run, data)
        self.references = [pair.target for pair in self.pairs.pairs]

    def _open(self, run: str, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
        return _sentences(run, self.translator.tokenizer, data)

    def _quality(self, texts: list[str]) -> Interval:
        return _bleu(texts, self.references, lowers_case(self.translator.tokenizer))

    def points(self) -> Sequence[OperatingPoint]:
        config, grid = self.translator.model.config, self.entry.grid
        command = f"deepenough lazy eval {shlex.quote(self.entry.run)} --search.beams 1"
        found = [OperatingPoint("all steps", {}, command=command)]
        steps = grid.steps
        if steps is None:
            own = config.encoder_steps
            steps = sorted({max(1, 2 * own // 3), max(1, own // 3)} - {own}, reverse=True)
        epsilons = config.usual_epsilons if grid.epsilon is None else grid.epsilon
        for each in steps:
            config.check_steps(each, "encoder_steps")
            told = f"{command} --search.encoder_steps {each}"
            setting = {"encoder_steps": each}
            found.append(
                OperatingPoint(f"{each} step{'s' * (each > 1)}", setting, "fixed depth", told)
            )
        for value in epsilons if self.mechanism == "lazy" else ():
            config.check_epsilon(value, "epsilon")
            told = f"{command} --search.epsilon {value:g}"
            found.append(OperatingPoint(f"ε {value:g}", {"epsilon": value}, command=told))
        return found

    def run(self, point: OperatingPoint) -> Translations:
        model, made = self.translator.model, Translations()
        hooks = [
            model.encoder.register_forward_hook(lambda *call: made.source.append(call[2].trace)),
            model.register_forward_hook(lambda *call: made.target.append(call[2].trace)),
        ]
        search = SearchSettings(beams=1, **dict(point.settings))
        try:
            made.texts = translate_pairs(*self.translator, self.pairs, search)
        finally:
            for hook in hooks:
                hook.remove()
        return made

    def judge(self, point: OperatingPoint, answers: Translations) -> Scores:
        both = answers.source + answers.target
        return Scores(
            quality=self._quality(answers.texts),
            units=len(answers.texts),
            layers=_steps(answers.source) + _steps(answers.target),
            flops=sum(trace.total_flops for trace in both),
        )


class ProgramCandidate(TranslationCandidate):
    """Programs, and what they print: right to the last digit, or wrong."""

    def _open(self, run: str, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
        split = data.split or "test"
        limit = data.limit or SENTENCES
        pairs, trained = held_out_pairs(run, split, self.translator.tokenizer, limit)
        # What the programs are drawn from names them, since there is no file of them.
        detail = {"programs": len(pairs), "seed": trained.train.seed, **asdict(trained.data)}
        return pairs, ComparedTask(
            "execution", "programs", split, "program", "exact match", True, detail
        )

    def _quality(self, texts: list[str]) -> Interval:
        right = sum(made == told for made, told in zip(texts, self.references, strict=True))
        return share_interval(right, len(texts))


def open_pairs(entry: Entry, name: str, data: ComparedData) -> TranslationCandidate:
    """The candidate for what a model was trained on."""
    task = read_config(str(model_folder(entry.run).parent)).get("task", "translation")
    kinds = {"translation": TranslationCandidate, "programs": ProgramCandidate}
    if task not in kinds:
        raise UserError(
            f"{entry.run} was trained on {task}, which has no operating points to compare: leave "
            "it out."
        )
    return kinds[task](entry, name, data)


def _sentences(run: str, tokenizer: Any, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
    trained = resolve(TranslationData, overrides=read_section(run, "data"))
    if data.data is not None:
        trained.corpus = data.data
    text, split = open_parallel(trained), data.split or "test"
    name = f"{text.name}, {split}"
    pairs = encode_pairs(text.pairs(split), tokenizer, trained.max_length, name, keep=True)
    kept = pairs.head(min(len(pairs), data.limit or SENTENCES))
    detail = {"sentences": len(kept), "languages": f"{trained.source} to {trained.target}"}
    detail |= {"lowercase": lowers_case(tokenizer), "content": content_of(kept.pairs)}
    return kept, ComparedTask("translation", text.name, split, "sentence", "BLEU", True, detail)


def _steps(traces: Sequence[DepthTrace]) -> float:
    """Blocks that ran for a real token, on average; padding goes nowhere."""
    ran = sum(int(trace.ran.sum()) for trace in traces)
    real = sum(int(torch.count_nonzero(trace.flops)) for trace in traces)
    return ran / real if real else 0.0


def _bleu(translations: list[str], references: list[str], lowercase: bool) -> Interval:
    """BLEU with sacrebleu's own bootstrap over sentences."""
    metric = sacrebleu.BLEU(lowercase=lowercase)
    score: Any = metric.corpus_score(translations, [references], n_bootstrap=RESAMPLES)
    value = float(score.score)
    # sacrebleu gives the middle of the resampled scores and half the width of their 95 %.
    middle, half = float(score._mean), float(score._ci)
    return Interval(value, min(value, middle - half), max(value, middle + half))
