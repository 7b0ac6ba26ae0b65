"""The parity experiment: train on few non-zero entries, measure on all (PonderNet, section 4.1).

Accuracy and passes are measured by difficulty, in bands of the number of non-zero entries, those
of training and those beyond. The model may be allowed more passes there than it was trained with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from deepenough.errors import UserError
from deepenough.ponder.loss import SINGLE_LABEL, answer_loss
from deepenough.ponder.parity_data import ParityBatch, ParityData, parity_batch
from deepenough.ponder.parity_model import ParityConfig, ParityModel
from deepenough.runs import Record, RunFolder, append_record, read_records
from deepenough.training.config import RunSettings, TrainingConfig, seed_at
from deepenough.training.distributed import make_accelerator, on_main
from deepenough.training.logging import without_bars
from deepenough.training.task import WEIGHTS, BatchLoss, PlainTask
from deepenough.training.trainer import check_folder, training

DIFFICULTY = "parity"
"""Kind of the records that tell accuracy and passes of one band of difficulty."""


@dataclass
class ParityModelSettings:
    """Network"""

    mechanism: Literal["ponder", "act", "fixed"] = "ponder"
    """What decides how long the network runs: PonderNet, Adaptive Computation Time, or nothing."""

    input: Literal["entries", "vector"] = "entries"
    """How the vector enters: as a sum over its entries, or as it is, which is harder to learn."""

    width: int = 64
    """Width of the recurrent state."""

    max_passes: int = 20
    """Passes in training."""

    eval_passes: int | None = None
    """Passes at most when measuring; by default those of training, which `fixed` always makes."""

    halting_target: float = 0.3
    """Halting probability of the geometric prior, lambda_p; its inverse is the prior's mean."""

    kl_weight: float = 0.1
    """Weight of the divergence from the prior, beta."""

    act_cost: float = 0.001
    """What a pass costs Adaptive Computation Time, tau."""

    input_decay: float = 1.0
    """Weight decay of the weights that read the input. It takes away what does not matter, such as
    the number of entries that are -1, and without that nothing holds beyond what was trained."""

    def config(self, size: int) -> ParityConfig:
        if self.eval_passes is not None and self.eval_passes < 1:
            raise UserError(f"model.eval_passes must be at least 1: got {self.eval_passes}.")
        if not self.input_decay >= 0:
            raise UserError(f"model.input_decay must not be negative: got {self.input_decay}.")
        own = ("eval_passes", "input_decay")
        return ParityConfig(size=size, **{k: v for k, v in asdict(self).items() if k not in own})


@dataclass
class ParityTraining:
    """A network that learns parity."""

    run: RunSettings = field(default_factory=RunSettings)
    data: ParityData = field(default_factory=ParityData)
    model: ParityModelSettings = field(default_factory=ParityModelSettings)
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            steps=8_000,
            lr=2e-3,
            warmup=500,
            weight_decay=0.1,
            betas=[0.9, 0.99],
            valid_every=1000,
            save_every=1000,
        )
    )


def train_parity(settings: ParityTraining) -> RunFolder:
    settings.train.check()
    settings.data.check()
    config = settings.model.config(settings.data.size)
    accelerator = make_accelerator(settings.train)
    if settings.data.batch_size % accelerator.num_processes:
        raise UserError(
            f"data.batch_size {settings.data.batch_size} cannot be dealt to "
            f"{accelerator.num_processes} processes: give a multiple."
        )
    check_folder(settings.run, accelerator)
    torch.manual_seed(settings.train.seed)
    task = ParityTask(ParityModel(config), settings, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    on_main(accelerator, lambda: _record_difficulty(task, trainer.run))
    return trainer.run


def _record_difficulty(task: ParityTask, run: RunFolder) -> None:
    """One record a band, for the picture of accuracy and passes against difficulty."""
    if any(record.kind == DIFFICULTY for record in read_records(run.metrics)[0]):
        return  # the run was finished before
    train = task.settings.train
    for band in task.measure(seed_at(train.seed, "final")):
        append_record(run.metrics, Record(train.steps, DIFFICULTY, band))


class ParityTask(PlainTask):
    unit = "inputs"

    def __init__(
        self, model: ParityModel, settings: ParityTraining, accelerator: Accelerator
    ) -> None:
        self.model, self.settings = model, settings
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.terms: dict[str, float] = {}

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        reading = self.model.cell.weight_ih
        matrices = [p for p in self.model.parameters() if p.dim() > 1 and p is not reading]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        return {
            WEIGHTS: [
                {"params": matrices},
                {"params": [reading], "weight_decay": self.settings.model.input_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
        }

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        data = self.settings.data
        seed = seed_at(self.settings.train.seed, "parity", step, micro)
        batch = parity_batch(data.batch_size, data.size, 1, data.train_nonzero, seed)
        vectors, labels = (
            tensor.chunk(self.world_size)[self.rank].to(self.model.device)
            for tensor in (batch.vectors, batch.labels)
        )
        loss = self.model.loss(model(vectors), labels)
        self.terms = {"task": float(loss.task.detach()), "kl": float(loss.kl.detach())}
        return BatchLoss(loss.total, loss.task, len(labels))

    def train_values(self) -> dict[str, Any]:
        return self.terms

    # -- measuring ---------------------------------------------------------------------------

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        if split != "valid":
            return {}
        data = self.settings.data
        # The same inputs at every validation.
        bands = self.measure(seed_at(self.settings.train.seed, "valid"))
        seen = [band for band in bands if band["highest"] <= data.train_nonzero]
        beyond = [band for band in bands if band["lowest"] > data.train_nonzero]
        values = {
            "loss": _mean(seen or bands, "loss"),
            "accuracy": _mean(seen or bands, "accuracy"),
            "passes": _mean(seen or bands, "passes"),
        }
        if beyond:
            values |= {
                "accuracy_beyond": _mean(beyond, "accuracy"),
                "passes_beyond": _mean(beyond, "passes"),
            }
        return values

    def measure(self, seed: int) -> list[dict[str, Any]]:
        """Accuracy, loss and passes of every band of difficulty."""
        data = self.settings.data
        bands = []
        for lowest, highest in data.ranges():
            batch = parity_batch(
                data.eval_size, data.size, lowest, highest, seed_at(seed, lowest, highest)
            )
            place = {
                "lowest": lowest,
                "highest": highest,
                "beyond": highest > data.train_nonzero,
                "mechanism": self.model.config.mechanism,
            }
            bands.append(place | measure_parity(self.model, batch, self._eval_passes()))
        return bands

    def _eval_passes(self) -> int:
        model = self.settings.model
        if model.mechanism == "fixed":  # its last pass is the only one that was trained to answer
            return model.max_passes
        return model.eval_passes or model.max_passes

    # -- state -------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        settings = self.settings
        data = ("size", "train_nonzero", "batch_size")
        return {
            "model": {k: v for k, v in asdict(settings.model).items() if k != "eval_passes"},
            "data": {name: getattr(settings.data, name) for name in data},
            "train": settings.train.identity(),
        }

    def save(self, folder: Path) -> None:
        with without_bars():
            self.model.save_pretrained(folder)


@torch.no_grad()
def measure_parity(model: ParityModel, batch: ParityBatch, num_passes: int) -> dict[str, Any]:
    was_training = model.training
    model.eval()
    answer = model.answer(model(batch.vectors.to(model.device), num_passes))
    model.train(was_training)
    labels = batch.labels.to(model.device)
    passes = answer.passes.double()
    return {
        "loss": float(answer_loss(answer.logits, labels, SINGLE_LABEL)),
        "accuracy": float((answer.logits.argmax(-1) == labels).double().mean()),
        "passes": float(passes.mean()),
        "passes_spread": float(passes.std(correction=0)),
        "inputs": len(labels),
    }


def _mean(bands: list[dict[str, Any]], name: str) -> float:
    return sum(band[name] for band in bands) / len(bands)
