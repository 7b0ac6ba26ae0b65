"""Search, derive, train: the three steps of PAR on a corpus, each leaving a run folder.

A run folder is made, overwritten or changed only when all settings have been found good: the data
is prepared, the model built and a checkpoint compared first.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator

from deepenough.config import RunConfig, resolve, validate
from deepenough.data import DatasetConfig, Prepared, prepare
from deepenough.errors import UserError
from deepenough.par import ParForCausalLM
from deepenough.par.config import ParConfig
from deepenough.par.derive import BlockCosts, derive
from deepenough.par.evaluation import load_model
from deepenough.par.latency import count_block_costs, measure_block_costs
from deepenough.par.pattern import OPEN, check_pattern, interleaved
from deepenough.par.search import SearchTask
from deepenough.par.settings import ModelSettings, SearchSettings
from deepenough.par.warm_start import take_weights
from deepenough.runs import Record, RunFolder, append_record, read_records
from deepenough.training.checkpoint import list_names
from deepenough.training.config import TrainingConfig
from deepenough.training.distributed import is_main_process, make_accelerator, on_main
from deepenough.training.language import LanguageTask
from deepenough.training.trainer import check_folder, training


@dataclass
class ParSearch(RunConfig):
    """A search for the blocks of a language model."""

    METHOD: ClassVar[str] = "par"

    data: str = "python"
    """Text: a file, folder or glob, `python` (the prose inside Python), a folder of
    $DEEPENOUGH_DATA, or a `datasets` name (`owner/name`, `hf:name:config:column`)."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelSettings = field(default_factory=ModelSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    train: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class ParTraining(RunConfig):
    """Training of a language model with fixed blocks."""

    METHOD: ClassVar[str] = "par"

    data: str = "python"
    """Text: a file, folder or glob, `python` (the prose inside Python), a folder of
    $DEEPENOUGH_DATA, or a `datasets` name (`owner/name`, `hf:name:config:column`)."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    start: str | None = None
    """Folder of a search or a model from whose weights to start; by default from new ones."""


@dataclass(frozen=True)
class Derived:
    """What a search found."""

    pattern: str
    probabilities: list[list[float]]
    relative_cost: float | None
    """Of a forward pass, as a share of the interleaved baseline's."""


def search(settings: ParSearch) -> Derived:
    """Train a SuperNet, derive its pattern, and train that if the settings ask for it."""
    validate(settings)
    if settings.model.pattern is not None and OPEN not in settings.model.pattern:
        raise UserError(
            f"The pattern {settings.model.pattern} leaves nothing to search: use "
            "`deepenough train` for it, or leave the pattern out."
        )
    closes = settings.search.decide_at < 1.0
    accelerator = make_accelerator(settings.train, closes or bool(settings.model.cutoffs))
    check_folder(settings, accelerator)
    prepared = _prepare(settings.data, settings.dataset, accelerator)
    config = settings.model.config(
        len(prepared.tokenizer),
        settings.dataset.length,
        settings.model.pattern,
        straight_through=settings.search.straight_through,
        learn_tau=settings.search.tau == "learned",
    )
    torch.manual_seed(settings.train.seed)
    task = SearchTask(
        ParForCausalLM(config),
        prepared,
        settings.dataset,
        settings.train,
        accelerator,
        settings.search,
    )
    task.costs = costs = block_costs(config, settings, accelerator)
    if settings.search.budget is not None:  # one that no pattern keeps is refused now
        equal = [[1.0, 1.0, 1.0]] * config.num_blocks
        budget, spend = settings.search.budget, settings.search.spend
        derive(equal, costs, budget, spend, settings.model.pattern)
    with training(settings, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "cost", asdict(costs) | {"unit": settings.search.cost})
        trainer.fit()
    run = trainer.run
    found = derive_run(run, settings.search.budget, settings.search.spend)
    if settings.search.retrain != "none":
        retrain = ParTraining(
            out=str(run.derived),
            resume=settings.resume,
            overwrite=settings.overwrite,
            data=settings.data,
            dataset=settings.dataset,
            model=replace(settings.model, pattern=found.pattern),
            train=settings.train,
            start=str(run.path) if settings.search.retrain == "supernet" else None,
        )
        train(retrain, prepared)
    return found


def train(settings: ParTraining, prepared: Prepared | None = None) -> RunFolder:
    """Train a model with the given pattern; the interleaved baseline where there is none."""
    validate(settings)
    pattern = check_pattern(settings.model.pattern or interleaved(settings.model.num_blocks))
    settings = replace(
        settings, model=replace(settings.model, pattern=pattern, num_blocks=len(pattern))
    )
    accelerator = make_accelerator(settings.train, bool(settings.model.cutoffs))
    check_folder(settings, accelerator)
    if prepared is None:
        prepared = _prepare(settings.data, settings.dataset, accelerator)
    torch.manual_seed(settings.train.seed)
    config = settings.model.config(len(prepared.tokenizer), settings.dataset.length, pattern)
    model = ParForCausalLM(config)
    if settings.start is not None:
        take_weights(model, load_model(settings.start), prepared.tokenizer, settings.start)
    task = LanguageTask(model, prepared, settings.dataset, settings.train, accelerator)
    task.is_warm = settings.start is not None
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


def derive_run(run: RunFolder, budget: float | None = None, spend: float = 0.0) -> Derived:
    """Read the pattern out of a search's records, and write it there."""
    records, _ = read_records(run.metrics)
    rows = [record.values["pi"] for record in records if "pi" in record.values]
    if not rows:
        raise UserError(f"{run.path} holds no search: give the folder of `deepenough search`.")
    costs = recorded_costs(records)
    if budget is not None and costs is None:
        raise UserError(f"{run.path} has no record of block costs, which a budget needs.")
    if not 0 <= spend <= 1:
        raise UserError(f"spend is a share of the budget, from 0 to 1: got {spend:g}.")
    pattern = derive(rows[-1], costs, budget, spend, _given_pattern(run))
    values: dict[str, Any] = {"pattern": pattern, "pi": rows[-1]}
    if costs is not None:
        values["relative_cost"] = costs.relative(pattern)
    if budget is not None:
        values["budget"] = budget
    earlier = [record.values for record in records if record.kind == "derive"]
    if is_main_process() and earlier[-1:] != [values]:
        last = max(record.step for record in records)
        append_record(run.metrics, Record(last, "derive", values))
    return Derived(pattern, rows[-1], values.get("relative_cost"))


def _given_pattern(run: RunFolder) -> str | None:
    """The pattern that a search began with, where it was given one."""
    return resolve(ParSearch, run.config).model.pattern if run.config.is_file() else None


def block_costs(config: ParConfig, settings: ParSearch, accelerator: Accelerator) -> BlockCosts:
    """Measured (or counted) by the first process, so that all of them share one table.

    A resumed run keeps the table it began with: its loss depends on it.
    """
    run = RunFolder(Path(settings.out))

    def find() -> dict[str, float]:
        if settings.resume and list_names(run.checkpoints) and run.metrics.is_file():
            known = recorded_costs(read_records(run.metrics)[0])
            if known is not None:
                return asdict(known)
        measure = measure_block_costs if settings.search.cost == "latency" else count_block_costs
        used = copy.deepcopy(config)
        if settings.search.cost_length is not None:
            used.length = used.mem_len = settings.search.cost_length
        return asdict(measure(used, settings.dataset.batch_size))

    return BlockCosts(**on_main(accelerator, find))


def recorded_costs(records: list[Record]) -> BlockCosts | None:
    """The table of block costs that a search has written down."""
    for record in reversed(records):
        if record.kind == "cost":
            values = {k: v for k, v in record.values.items() if k != "unit"}
            return BlockCosts(**values)
    return None


def _prepare(text: str, dataset: DatasetConfig, accelerator: Accelerator) -> Prepared:
    """The first process fills the cache, the others find it filled."""
    prepared: list[Prepared] = []
    on_main(accelerator, lambda: prepared.append(prepare(text, dataset)))
    return prepared[0] if prepared else prepare(text, dataset)
