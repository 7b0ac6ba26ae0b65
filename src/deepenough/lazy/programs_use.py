"""Use of a model that executes programs: how many of its answers are right, and how hard ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from deepenough.config import resolve
from deepenough.lazy.evaluation import keep_record, load_translator
from deepenough.lazy.programs_training import ProgramTraining, held_out_programs, measure_programs
from deepenough.lazy.translate_score import SearchSettings
from deepenough.runs import RunFolder, model_folder

EVALUATION = "programs"
"""Kind of the records that tell exact match of one setting."""


@dataclass
class ProgramEvaluation:
    """Measure a model that executes programs."""

    run: str
    """Folder of a finished training."""

    split: str = "test"
    """Programs to measure on, test or valid: neither is ever trained on."""

    length: int | None = None
    """Digits of numbers at most; by default as in training. More asks for what was never seen."""

    nesting: int | None = None
    """Operations put into one another at most; by default as in training."""

    search: SearchSettings = field(default_factory=lambda: SearchSettings(beams=1))


def evaluate_programs(settings: ProgramEvaluation) -> dict[str, Any]:
    """Exact match on held-out programs, also by kind, nesting and length; recorded in the run."""
    translator = load_translator(settings.run)
    trained = resolve(ProgramTraining, RunFolder(model_folder(settings.run).parent).config)
    data = replace(
        trained.data,
        length=trained.data.length if settings.length is None else settings.length,
        nesting=trained.data.nesting if settings.nesting is None else settings.nesting,
    )
    programs = held_out_programs(data, settings.split, trained.train.seed)
    # Longer programs than in training need only more of the same position signals.
    config = translator.model.config
    config.max_positions = max(config.max_positions, 2 * data.max_length + 16)
    values = measure_programs(*translator, programs, settings.search)
    values |= {"split": settings.split, "length": data.length, "nesting": data.nesting}
    values |= {"programs": len(programs), "mechanism": config.mechanism}
    keep_record(settings.run, EVALUATION, values)
    return values
