"""Search, derive, train: the three steps of PAR on a text, each leaving a run folder.

A run folder is changed only when the data is prepared, the model built and a checkpoint compared.
"""

import copy
import logging
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from deepenough.config import from_fields, validate
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import Prepared, prepare, tokenizer_fingerprint
from deepenough.errors import UserError
from deepenough.nn.cutoffs import USUAL_CLUSTERS, cutoffs_by_share
from deepenough.par.config import (
    OPEN,
    ParDeriveConfig,
    ParModelConfig,
    ParRunConfig,
    ParSearchConfig,
    ParTrainConfig,
    check_pattern,
    interleaved,
)
from deepenough.par.evaluation import load_model
from deepenough.par.modeling import ParConfig, ParPreTrainedModel, new_model
from deepenough.par.search import (
    BlockCosts,
    SearchTask,
    count_block_costs,
    derive,
    entropy,
    measure_block_costs,
)
from deepenough.runs import Record, RunFolder, append_record, read_config, read_records
from deepenough.training.checkpoint import list_names
from deepenough.training.distributed import is_main_process, on_main
from deepenough.training.language import LanguageTask
from deepenough.training.logging import announce
from deepenough.training.trainer import begin_run, fit_run, training

log = logging.getLogger("deepenough")

C = TypeVar("C", bound=ParRunConfig)

_UNDECIDED = 0.5
"""Entropy above which a block is undecided: the leading probability is then below about 0.83."""


@dataclass(frozen=True)
class DerivedPattern:
    """What a search found."""

    pattern: str
    probabilities: list[list[float]]
    relative_cost: float | None
    """Cost of a forward pass as a share of the interleaved baseline's; None where none is known."""
    entropy: float
    """How undecided the search is: mean entropy of the blocks' choices over its maximum."""
    undecided_blocks: list[int]
    """Blocks, counted from 1, whose entropy is above half of its maximum."""
    choice_steps: int | None
    """Steps in which choices were trained; None in records of earlier versions."""

    def doubt(self) -> str:
        """Return a line that says that the search has not decided; nothing if it has."""
        if not self.undecided_blocks:
            return ""
        return (
            f"not decided: {len(self.undecided_blocks)} of {len(self.pattern)} blocks, after "
            f"{self.choice_steps} steps that trained choices, with a mean entropy of "
            f"{self.entropy:.2f} (1 is no preference, 0 a decision); search for longer (--resume "
            "--steps N), or with a higher search.alpha_lr\n"
        )


def search(config: ParSearchConfig) -> DerivedPattern:
    """Train a SuperNet, return the pattern it leads to, and train that if the settings ask."""
    validate(config)
    if config.model.pattern is not None and OPEN not in config.model.pattern:
        raise UserError(
            f"The pattern {config.model.pattern} leaves nothing to search: use "
            "`deepenough par train` for it, or leave the pattern out."
        )
    how = {"straight_through": config.search.straight_through}
    how["learn_tau"] = config.search.tau == "learned"
    config, accelerator, prepared, model = _set_up(config, None, **how)
    costs = block_costs(model.config, config, accelerator)
    task = SearchTask(
        model, prepared, config.dataset, config.train, accelerator, config.search, costs
    )
    task.is_warm = config.start is not None
    budget = config.search.budget
    if budget is not None:  # one that no pattern keeps is refused now
        equal = [[1 / 3] * 3] * len(model.blocks)
        derive(equal, costs, budget, config.model.pattern)
    with training(config, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "cost", asdict(costs) | {"unit": config.search.cost})
        trainer.fit()
    run = trainer.run
    found = derive_run(run, budget)
    if config.search.retrain != "none":
        shared = {option.name: getattr(config, option.name) for option in fields(ParRunConfig)}
        retrain = ParTrainConfig(**shared)
        retrain.out = str(run.derived)
        retrain.model = replace(config.model, pattern=found.pattern)
        retrain.start = str(run.path) if config.search.retrain == "supernet" else None
        train(retrain, prepared)
    return found


def train(config: ParTrainConfig, prepared: Prepared | None = None) -> RunFolder:
    """Train a model with the given pattern, or the interleaved one, and return its run folder."""
    validate(config)
    pattern = check_pattern(config.model.pattern or interleaved(config.model.num_blocks))
    model_settings = replace(config.model, pattern=pattern, num_blocks=len(pattern))
    config = replace(config, model=model_settings)
    config, accelerator, prepared, model = _set_up(config, prepared)
    task = LanguageTask(model, prepared, config.dataset, config.train, accelerator)
    task.is_warm = config.start is not None
    return fit_run(config, task, accelerator)


def _set_up(
    config: C, prepared: Prepared | None = None, **search: bool
) -> tuple[C, Accelerator, Prepared, ParPreTrainedModel]:
    """Return the settings with cutoffs resolved, the processes, the text and the model of a run."""
    accelerator = begin_run(config, bool(config.model.cutoffs))
    if prepared is None:
        prepared = _prepare(config, accelerator)
    config = replace(config, model=with_cutoffs(config.model, prepared))
    torch.manual_seed(config.train.seed)
    sizes = asdict(config.model) | {"length": config.dataset.length} | search
    model = new_model(ParConfig(len(prepared.tokenizer), **sizes))
    if config.start is not None:
        take_weights(model, prepared.tokenizer, config.start)
    return config, accelerator, prepared, model


def derive_run(run: RunFolder, budget: float | None = None) -> DerivedPattern:
    """Read the pattern out of a search's records, record it there, and return it."""
    validate(ParDeriveConfig(str(run.path), budget))
    records, _ = read_records(run.metrics)
    searched = [record for record in records if "pi" in record.values]
    if not searched:
        raise UserError(f"{run.path} holds no search: give the folder of `deepenough par search`.")
    rows = searched[-1].values["pi"]
    costs = recorded_costs(records)
    if budget is not None and costs is None:
        raise UserError(f"{run.path} has no record of block costs, which a budget needs.")
    settings = read_config(str(run.path)) if run.config.is_file() else {}
    model = settings.get("model")
    given = model.get("pattern") if isinstance(model, dict) else None
    pattern = derive(rows, costs, budget, given)
    entropies = [entropy(torch.tensor([row])) for row in rows]
    doubt: dict[str, Any] = {
        "entropy": sum(entropies) / len(entropies),
        "undecided_blocks": [i for i, value in enumerate(entropies, 1) if value > _UNDECIDED],
        "choice_steps": searched[-1].values.get("choice_steps"),
    }
    values: dict[str, Any] = {"pattern": pattern, "pi": rows} | doubt
    if costs is not None:
        values["relative_cost"] = costs.relative(pattern)
    if budget is not None:
        values["budget"] = budget
    earlier = [record.values for record in records if record.kind == "derive"]
    if is_main_process() and earlier[-1:] != [values]:
        last = max(record.step for record in records)
        with run.lock():
            append_record(run.metrics, Record(last, "derive", values))
    return DerivedPattern(pattern, rows, values.get("relative_cost"), **doubt)


def block_costs(
    model_config: ParConfig, config: ParSearchConfig, accelerator: Accelerator
) -> BlockCosts:
    """Return the table of costs, found by the first process and shared by all of them.

    A resumed run keeps the table it began with: its loss depends on it.
    """
    run = RunFolder(Path(config.out))

    def find() -> dict[str, float]:
        if config.resume and list_names(run.checkpoints) and run.metrics.is_file():
            known = recorded_costs(read_records(run.metrics)[0])
            if known is not None:
                return asdict(known)
        measure = measure_block_costs if config.search.cost == "latency" else count_block_costs
        used = copy.deepcopy(model_config)
        if config.search.cost_length is not None:
            used.length = config.search.cost_length
            used.mem_len = 0 if used.bidirectional else used.length
        return asdict(measure(used, config.dataset.batch_size))

    return BlockCosts(**on_main(accelerator, find))


def recorded_costs(records: list[Record]) -> BlockCosts | None:
    """Return the table of block costs that a search has written down, or None."""
    tables = [record.values for record in records if record.kind == "cost"]
    if not tables:
        return None
    try:
        table = {name: cost for name, cost in tables[-1].items() if name != "unit"}
        return from_fields(BlockCosts, table)
    except ValueError as error:
        raise UserError(f"The record of block costs is damaged ({error}): search again.") from error


def _prepare(config: ParRunConfig, accelerator: Accelerator) -> Prepared:
    """Return the prepared text: the first process fills the cache, the others find it filled."""

    def find() -> Prepared:
        return prepare(config.data, config.dataset, config.model.objective == "masked")

    prepared: list[Prepared] = []
    on_main(accelerator, lambda: prepared.append(find()))
    return prepared[0] if prepared else find()


def with_cutoffs(model: ParModelConfig, prepared: Prepared) -> ParModelConfig:
    """Return the settings of a model with the cutoffs that cost least, where they are auto."""
    if model.cutoffs != "auto":
        return model
    counts = prepared.tokens["train"].vocab_counts()
    found = cutoffs_by_share(counts, USUAL_CLUSTERS)
    announce(
        f"The cutoffs that suit the training text are {found.cutoffs}: a token costs "
        f"{found.cost:,.1f} outputs instead of {len(counts):,}."
    )
    return validate(replace(model, cutoffs=found.cutoffs))


def take_weights(
    model: ParPreTrainedModel, tokenizer: PreTrainedTokenizerBase, origin: str
) -> None:
    """Copy all weights that the model in the folder `origin` has too; both must be of one shape.

    A block of a kind that is not there keeps its new weights. That happens where a budget asks for
    another branch than the search had settled on.
    """
    source = load_model(origin)
    folder = str(source.name_or_path)
    for name in ("objective", "d_model", "num_heads", "d_ff", "cutoffs", "div_value"):
        there, here = getattr(source.config, name), getattr(model.config, name)
        if there != here:
            raise UserError(
                f"The model in {origin} has model.{name} {there}, not {here}: give the same model "
                "settings."
            )
    there, here = len(source.blocks), len(model.blocks)
    if source.choice is not None and model.choice is not None and there != here:
        raise UserError(
            f"The search in {origin} has {there} blocks, not {here}: give the same number."
        )
    if tokenizer_fingerprint(load_tokenizer(folder)) != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"The model in {origin} has another tokenizer, so its weights mean other tokens: give "
            f"--dataset.tokenizer {folder}."
        )
    missing, _ = model.load_state_dict(source.state_dict(), strict=False)
    for block in sorted({int(name.split(".")[1]) for name in missing if name.startswith("blocks")}):
        log.warning(
            "Block %d starts from new weights: %s has none, or not all, for %r there.",
            block + 1,
            origin,
            model.pattern[block],
        )
