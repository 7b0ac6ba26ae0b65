"""Learning to Execute as a training: programs as they come, exact match on programs held out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator

from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.lazy import LazyTransformerForConditionalGeneration
from deepenough.lazy.programs import HELD_OUT, Program, ProgramData, held_out
from deepenough.lazy.programs_batches import ProgramBatches
from deepenough.lazy.programs_tokens import character_tokenizer
from deepenough.lazy.settings import LazySettings
from deepenough.lazy.task import PairsTask, model_identity, plain_loss
from deepenough.lazy.training import make_model
from deepenough.lazy.translate_score import SearchSettings, translate_pairs
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings, TrainingConfig, seed_at
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import check_folder, training

EVAL_TOKENS = 8192
"""Tokens that are measured at once."""


@dataclass
class ProgramTraining:
    """A model that executes programs."""

    task: Literal["programs"] = "programs"
    """What is learned: translation, programs or language; each has options of its own."""

    run: RunSettings = field(default_factory=RunSettings)
    data: ProgramData = field(default_factory=ProgramData)
    model: LazySettings = field(
        default_factory=lambda: LazySettings(
            d_model=128, d_ff=512, encoder_steps=4, dropout=0.0, ff_dropout=0.0, label_smoothing=0.0
        )
    )
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(steps=4000, lr=1e-3, warmup=400, betas=[0.9, 0.98])
    )


def train_programs(settings: ProgramTraining) -> RunFolder:
    settings.train.check()
    settings.data.check()
    accelerator = make_accelerator(settings.train, may_skip=False)
    check_folder(settings.run, accelerator)
    tokenizer = character_tokenizer()
    torch.manual_seed(settings.train.seed)
    model = make_model(settings.model, tokenizer, settings.data.max_length)
    task = ProgramTask(model, tokenizer, settings.data, settings.train, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


class ProgramTask(PairsTask):
    def __init__(
        self,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        data: ProgramData,
        train: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(model, tokenizer, train, accelerator)
        self.data = data
        self.batches = ProgramBatches(data, tokenizer, train.seed)
        self.held_out = {split: held_out_programs(data, split, train.seed) for split in HELD_OUT}

    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        return self.batches.batch(index)

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Plain loss, and the share of answers that are right, of all and of each kind."""
        programs = self.held_out[split]
        was_training = self.model.training
        self.model.eval()
        greedy = SearchSettings(beams=1)
        values = measure_programs(self.model, self.tokenizer, programs, greedy, accelerator)
        self.model.train(was_training)
        return {name: value for name, value in values.items() if isinstance(value, float)}

    def identity(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self.data).items() if name != "eval_size"}
        return {
            "model": model_identity(self.model.config),
            "data": kept,
            "train": self.train.identity(),
        }


def held_out_programs(data: ProgramData, split: str, seed: int) -> list[Program]:
    return held_out(data, split, seed_at(seed, "held out"))


def measure_programs(
    model: LazyTransformerForConditionalGeneration,
    tokenizer: Any,
    programs: Sequence[Program],
    search: SearchSettings,
    accelerator: Accelerator | None = None,
) -> dict[str, Any]:
    """Loss, exact match of all and of each kind, and `exact_by`: of each kind, nesting, length."""
    longest = max(max(len(program.source), len(program.target)) for program in programs) + 1
    pairs = encode_pairs(
        (program.pair for program in programs), tokenizer, longest, "programs", keep=True
    )
    values: dict[str, Any] = plain_loss(model, pairs, max(EVAL_TOKENS, longest), accelerator)
    answers = translate_pairs(model, tokenizer, pairs, search, accelerator=accelerator)
    right = [answer == program.target for answer, program in zip(answers, programs, strict=True)]
    values["exact"] = _share(right)
    for kind in sorted({program.kind for program in programs}):
        of_kind = [
            hit for hit, program in zip(right, programs, strict=True) if program.kind == kind
        ]
        values[f"exact_{kind}"] = _share(of_kind)
    return values | {"exact_by": exact_by(programs, right)}


def exact_by(programs: Iterable[Program], right: Iterable[bool]) -> list[dict[str, Any]]:
    """Exact match of every difficulty, easiest first."""
    groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
    for program, hit in zip(programs, right, strict=True):
        groups[program.kind, program.nesting, program.length].append(hit)
    return [
        {"kind": kind, "nesting": nesting, "length": length, "exact": _share(hits),
         "programs": len(hits)}
        for (kind, nesting, length), hits in sorted(groups.items())
    ]  # fmt: skip


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)
