"""Search, derive, train: the three steps of PAR on a corpus, each leaving a run folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from deepenough.adaptive.par import ParForCausalLM
from deepenough.adaptive.par.config import ParConfig
from deepenough.adaptive.par.derive import BlockCosts, derive
from deepenough.adaptive.par.pattern import OPEN, check_pattern, interleaved
from deepenough.adaptive.par.settings import ModelSettings, SearchSettings
from deepenough.data import DataSettings, Prepared, prepare
from deepenough.errors import UserError
from deepenough.measure.latency import count_block_costs, measure_block_costs
from deepenough.runs import Record, RunFolder, append_record, read_records
from deepenough.settings import dump
from deepenough.train.language import LanguageTask, SearchTask
from deepenough.train.log import log_to
from deepenough.train.loop import Trainer, make_accelerator
from deepenough.train.settings import RunSettings, TrainSettings
from deepenough.train.use import load_model

log = logging.getLogger("deepenough")


@dataclass
class ParSearch:
    """A search for the blocks of a language model."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass
class ParTraining:
    """Training of a language model with fixed blocks."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
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
    settings.search.check()
    if settings.model.pattern is not None and OPEN not in settings.model.pattern:
        raise UserError(
            f"The pattern {settings.model.pattern} leaves nothing to search: use `deepenough train` "
            "for it, or leave the pattern out."
        )
    accelerator = make_accelerator(settings.train)
    prepared = _prepare(settings.data, accelerator)
    config = settings.model.config(
        len(prepared.tokenizer),
        settings.data.length,
        settings.model.pattern,
        straight_through=settings.search.straight_through,
        learn_tau=settings.search.tau == "learned",
    )
    run = _start(settings, settings.run, accelerator)
    costs = block_costs(config, settings, run, accelerator)
    torch.manual_seed(settings.train.seed)
    task = SearchTask(
        ParForCausalLM(config),
        prepared,
        settings.data,
        settings.train,
        accelerator,
        settings.search,
        costs,
    )
    Trainer(task, settings.train, run, accelerator).fit()
    found = derive_run(run, settings.search.budget)
    if settings.search.retrain != "none":
        retrain = ParTraining(
            run=replace(settings.run, folder=str(run.derived)),
            data=settings.data,
            model=replace(settings.model, pattern=found.pattern),
            train=settings.train,
            start=str(run.path) if settings.search.retrain == "supernet" else None,
        )
        train(retrain, prepared)
    return found


def train(settings: ParTraining, prepared: Prepared | None = None) -> RunFolder:
    """Train a model with the given pattern; the interleaved baseline where there is none."""
    pattern = check_pattern(settings.model.pattern or interleaved(settings.model.num_blocks))
    settings.model = replace(settings.model, pattern=pattern, num_blocks=len(pattern))
    accelerator = make_accelerator(settings.train)
    if prepared is None:
        prepared = _prepare(settings.data, accelerator)
    torch.manual_seed(settings.train.seed)
    if settings.start is None:
        config = settings.model.config(len(prepared.tokenizer), settings.data.length, pattern)
        model = ParForCausalLM(config)
    else:
        model = load_model(settings.start).with_pattern(pattern)
    run = _start(settings, settings.run, accelerator)
    task = LanguageTask(model, prepared, settings.data, settings.train, accelerator)
    Trainer(task, settings.train, run, accelerator).fit()
    return run


def derive_run(run: RunFolder, budget: float | None = None) -> Derived:
    """Read the pattern out of a search's records, and write it there."""
    records, _ = read_records(run.metrics)
    rows = [record.values["pi"] for record in records if "pi" in record.values]
    if not rows:
        raise UserError(f"{run.path} holds no search: give the folder of `deepenough search`.")
    measured = [record.values for record in records if record.kind == "cost"]
    costs = BlockCosts(**{k: measured[-1][k] for k in _COSTS}) if measured else None
    if budget is not None and costs is None:
        raise UserError(f"{run.path} has no record of block costs, which a budget needs.")
    pattern = derive(rows[-1], costs, budget)
    relative = costs.relative(pattern) if costs is not None else None
    found = Derived(pattern, rows[-1], relative)
    last = max(record.step for record in records)
    values: dict[str, Any] = {"pattern": pattern, "pi": rows[-1]}
    if relative is not None:
        values["relative_cost"] = relative
    if budget is not None:
        values["budget"] = budget
    if Accelerator().is_main_process:
        append_record(run.metrics, Record(last, "derive", values))
    return found


_COSTS = ("attention", "dense", "identity", "rest")


def block_costs(
    config: ParConfig, settings: ParSearch, run: RunFolder, accelerator: Accelerator
) -> BlockCosts:
    """Measured (or counted) by the first process, so that all of them share one table.

    A resumed run keeps the table it began with: its loss depends on it.
    """
    if run.metrics.is_file():
        for record in read_records(run.metrics)[0]:
            if record.kind == "cost":
                return BlockCosts(**{name: record.values[name] for name in _COSTS})
    lanes = settings.data.batch_size
    table: list[BlockCosts | None] = [None]
    if accelerator.is_main_process:
        measure = measure_block_costs if settings.search.cost == "latency" else count_block_costs
        costs = measure(config, lanes)
        table[0] = costs
        values = {name: getattr(costs, name) for name in _COSTS} | {"unit": settings.search.cost}
        append_record(run.metrics, Record(0, "cost", values))
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(table)
    assert table[0] is not None
    return table[0]


def _prepare(data: DataSettings, accelerator: Accelerator) -> Prepared:
    """The first process fills the cache, the others find it filled."""
    with accelerator.main_process_first():
        return prepare(data)


def _start(settings: Any, run_settings: RunSettings, accelerator: Accelerator) -> RunFolder:
    run = RunFolder(Path(run_settings.folder))
    if accelerator.is_main_process:
        run = RunFolder.create(
            run_settings.folder, resume=run_settings.resume, overwrite=run_settings.overwrite
        )
        dump(settings, run.config)
        log_to(run.log)
    accelerator.wait_for_everyone()
    return run
