"""PonderNet's parity experiment, with ACT and fixed depth beside it (arXiv 2107.05407, 4.1).

**Task** (ACT, arXiv 1603.08983, section 3.1). An input is a vector of `size` entries. Some of them,
at random places, are 1 or -1, the others 0; the label is 1 if the number of ones is odd. How many
entries are not zero is the difficulty of the input: a model that is trained on few and measured on
more has to have found a procedure, not a table. Batches are a function of their seed, so that a
training can be resumed anywhere.

**Network.** One GRU cell is applied again and again to the same input; after each pass a classifier
gives `y_n` and a halting unit the logit of `lambda_n`. In the paper the vector enters as it is, and
the network has to find out that entries are alike. Here two numbers enter, the sum of the positive
and that of the negative entries: what is left to learn is the procedure itself. Mechanisms:

- `ponder`: PonderNet. Its loss is the expectation over passes; it answers with the pass at which it
  halts, the first one whose cumulative halting probability reaches one half.
- `act`: Adaptive Computation Time; it answers with a weighted mean of passes.
- `fixed`: always all passes; it answers with the last one.

Shapes: B inputs, D entries, N passes, H width, C labels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from deepenough.config import DeviceConfig, RunConfig, bounded
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.nn.layers import act_halting
from deepenough.ponder.figures import PARITY
from deepenough.ponder.halting import (
    FixedExit,
    PonderLoss,
    QuantileExit,
    answer_loss,
    log_halting,
    ponder_loss,
)
from deepenough.ponder.inference import replay, select_pass
from deepenough.runs import Record, RunFolder, read_records, replace_records
from deepenough.training.checkpoint import SealedPreTrainedModel
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import on_main
from deepenough.training.task import WEIGHTS, BatchLoss, Task
from deepenough.training.trainer import begin_run, fit_run

INPUT_DECAY = 1.0
"""Weight decay of the weights that read the input. It takes away what does not matter, such as the
number of entries that are -1, and without that nothing holds beyond what was trained."""


# -- settings --------------------------------------------------------------------------------------


@dataclass
class ParityDataConfig:
    """Parity vectors."""

    size: int = bounded(16, ge=1)
    """Entries of an input vector."""

    train_nonzero: int = bounded(10, ge=1)
    """Most entries that are not zero in training; more, up to the size, are for extrapolation."""

    batch_size: int = bounded(128, ge=1)
    """Inputs in one batch, over all processes."""

    eval_size: int = bounded(1000, ge=1)
    """Inputs of each difficulty band that are measured."""

    bands: int = bounded(8, ge=1)
    """Equal ranges of difficulty, from 1 to the size, into which measurements are divided."""

    def check(self) -> None:
        """Refuse vectors too short for their entries, and bands of unequal width."""
        if self.train_nonzero > self.size:
            raise UserError(
                f"dataset.train_nonzero is {self.train_nonzero}, but the vectors have only "
                f"{self.size} entries: raise dataset.size or lower it."
            )
        if self.size % self.bands:
            raise UserError(
                f"dataset.bands must divide dataset.size: {self.size} entries do not fall into "
                f"{self.bands} equal bands."
            )

    def ranges(self) -> list[tuple[int, int]]:
        """Return the lowest and highest number of non-zero entries of each band."""
        width = self.size // self.bands
        return [(start + 1, start + width) for start in range(0, self.size, width)]


@dataclass
class ParityModelConfig:
    """Recurrent network."""

    mechanism: Literal["ponder", "act", "fixed"] = "ponder"
    """What decides how long the network runs: PonderNet, Adaptive Computation Time, or nothing."""

    width: int = bounded(64, ge=1)
    """Width of the recurrent state."""

    max_passes: int = bounded(20, ge=1)
    """Passes in training, and the most when measured; `fixed` always makes all."""

    halting_target: float = bounded(0.3, gt=0, lt=1)
    """Halting probability of the geometric prior, lambda_p; its inverse is the prior's mean."""

    kl_weight: float = bounded(0.1, ge=0)
    """Weight of the divergence from the prior, beta."""

    act_cost: float = 0.001
    """What a pass costs Adaptive Computation Time, tau."""


@dataclass
class ParityTrainConfig(DeviceConfig, RunConfig):
    """A network that learns parity."""

    METHOD: ClassVar[str] = "ponder"

    dataset: ParityDataConfig = field(default_factory=ParityDataConfig)
    model: ParityModelConfig = field(default_factory=ParityModelConfig)
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            steps=8_000,
            lr=2e-3,
            warmup=0.0625,
            weight_decay=0.1,
            betas=[0.9, 0.99],
            valid_every=1000,
            save_every=1000,
        )
    )


class ParityConfig(PreTrainedConfig):
    """Config of the parity network: its input's `size` and the fields of `ParityModelConfig`."""

    model_type = "deepenough-parity"


# -- task ------------------------------------------------------------------------------------------


def parity_batch(
    num: int, size: int, lowest: int, highest: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return vectors `[num, size]` of -1, 0 and 1, and labels, 1 where the number of ones is odd.

    Each vector has a number of non-zero entries drawn from lowest..highest.
    """
    if not 1 <= lowest <= highest <= size:
        raise ValueError(f"no vector of {size} entries has {lowest} to {highest} that are not 0")
    generator = torch.Generator().manual_seed(seed)
    nonzero = torch.randint(lowest, highest + 1, (num, 1), generator=generator)
    # The ranks of random numbers: a random place in the order for every entry of a vector.
    ranks = torch.rand(num, size, generator=generator).argsort(1).argsort(1)
    signs = torch.randint(0, 2, (num, size), generator=generator) * 2 - 1
    vectors = torch.where(ranks < nonzero, signs, 0)
    return vectors.float(), (vectors == 1).sum(1) % 2


# -- network ---------------------------------------------------------------------------------------


class ParityModel(SealedPreTrainedModel):
    """A GRU cell that is applied to the same input until it halts."""

    config_class = ParityConfig
    main_input_name = "vectors"

    def __init__(self, config: ParityConfig) -> None:
        super().__init__(config)
        self.cell = nn.GRU(2, config.width)
        self.classifier = nn.Linear(config.width, 2)
        self.halt = nn.Linear(config.width, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep torch's initial weights, but for halting: a new model halts as the prior does."""
        if module is self.halt:
            target = self.config.halting_target
            init.constant_(self.halt.bias, math.log(target) - math.log1p(-target))

    def forward(self, vectors_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Make all passes; return answers `[N, B, C]` and logits of `lambda_n`, `[B, N]`."""
        sums = vectors_BD.clamp(min=0).sum(-1), -vectors_BD.clamp(max=0).sum(-1)
        inputs = torch.stack(sums, -1) / math.sqrt(self.config.size)
        states_NBH, _ = self.cell(inputs.expand(self.config.max_passes, -1, -1))
        return self.classifier(states_NBH), self.halt(states_NBH)[..., 0].T

    def answer(self, step_logits_NBC: Tensor, halt_logits_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the model says in the end, `[B, C]`, and after how many passes, `[B]`."""
        if self.config.mechanism == "act":
            halting = act_halting(halt_logits_BN)
            logits = torch.einsum("bn,nbc->bc", halting.weights, step_logits_NBC)
            return logits, halting.passes
        policy = QuantileExit() if self.config.mechanism == "ponder" else FixedExit()
        passes = replay(policy, step_logits_NBC, halt_logits_BN)
        return select_pass(step_logits_NBC, passes), passes

    def loss(self, step_logits_NBC: Tensor, halt_logits_BN: Tensor, labels: Tensor) -> PonderLoss:
        """Return the loss of the mechanism; of ACT, `kl` is the mean cost of its passes."""
        config = self.config
        if config.mechanism == "ponder":
            log_p = log_halting(halt_logits_BN, config.max_passes)
            return ponder_loss(
                step_logits_NBC, log_p, labels, config.halting_target, config.kl_weight
            )
        task = answer_loss(self.answer(step_logits_NBC, halt_logits_BN)[0], labels)
        if config.mechanism == "fixed":
            return PonderLoss(task, task, torch.zeros_like(task))
        cost = act_halting(halt_logits_BN).cost.mean()
        return PonderLoss(task + config.act_cost * cost, task, cost)


# -- experiment ------------------------------------------------------------------------------------


def train_parity(settings: ParityTrainConfig) -> RunFolder:
    """Train a network on parity, measure it by difficulty, and return its run folder."""
    accelerator = begin_run(settings)
    if settings.dataset.batch_size % accelerator.num_processes:
        raise UserError(
            f"dataset.batch_size {settings.dataset.batch_size} cannot be divided "
            f"among {accelerator.num_processes} processes: give a multiple of that."
        )
    torch.manual_seed(settings.train.seed)
    config = ParityConfig(**asdict(settings.model) | {"size": settings.dataset.size})
    task = ParityTask(ParityModel(config), settings, accelerator)
    run = fit_run(settings, task, accelerator)
    on_main(accelerator, lambda: _record_difficulty(task, run))
    return run


def _record_difficulty(task: ParityTask, run: RunFolder) -> None:
    """Write one record a band, for the picture of accuracy and passes against difficulty."""
    if any(record.kind == PARITY for record in read_records(run.metrics)[0]):
        return  # the run was finished before
    train = task.settings.train
    bands = task.measure(seed_at(train.seed, "final"))
    # All at once: a kill between two of them must not pass for a run that is finished.
    replace_records(run.metrics, [Record(train.steps, PARITY, band) for band in bands])


class ParityTask(Task):
    """Parity as a task of the training loop."""

    unit = "inputs"
    model: ParityModel

    def __init__(
        self, model: ParityModel, settings: ParityTrainConfig, accelerator: Accelerator
    ) -> None:
        super().__init__(model, settings.train, accelerator)
        self.settings = settings

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups, which differ in weight decay."""
        reading = self.model.cell.weight_ih_l0
        matrices = [p for p in self.model.parameters() if p.dim() > 1 and p is not reading]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        return {
            WEIGHTS: [
                {"params": matrices},
                {"params": [reading], "weight_decay": INPUT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ]
        }

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of one batch; all processes draw it and each takes its share."""
        data = self.settings.dataset
        seed = seed_at(self.settings.train.seed, "parity", step, micro)
        batch = parity_batch(data.batch_size, data.size, 1, data.train_nonzero, seed)
        vectors, labels = (
            part.chunk(self.world_size)[self.rank].to(self.model.device) for part in batch
        )
        step_logits, halt_logits = model(vectors)
        loss = self.model.loss(step_logits, halt_logits, labels)
        self.terms = {"task": float(loss.task.detach()), "kl": float(loss.kl.detach())}
        return BatchLoss(loss.total, loss.task, len(labels))

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return quality on the bands of training, and on those beyond."""
        if split != "valid":
            return {}
        # The same inputs at every validation.
        bands = self.measure(seed_at(self.settings.train.seed, "valid"))
        beyond = [band for band in bands if band["beyond"]]
        seen = [band for band in bands if not band["beyond"]] or bands
        values = {name: _mean(seen, name) for name in ("loss", "accuracy", "passes")}
        if beyond:
            values |= {f"{name}_beyond": _mean(beyond, name) for name in ("accuracy", "passes")}
        return values

    @torch.no_grad()
    def measure(self, seed: int) -> list[dict[str, Any]]:
        """Return accuracy, loss and passes of every band of difficulty."""
        data = self.settings.dataset
        bands = []
        for lowest, highest in data.ranges():
            vectors, labels = parity_batch(
                data.eval_size, data.size, lowest, highest, seed_at(seed, lowest, highest)
            )
            labels = labels.to(self.model.device)
            logits, passes = self.model.answer(*self.model(vectors.to(self.model.device)))
            bands.append(
                {
                    "lowest": lowest,
                    "highest": highest,
                    "beyond": highest > data.train_nonzero,
                    "mechanism": self.model.config.mechanism,
                    "loss": float(answer_loss(logits, labels)),
                    "accuracy": float(exact(logits.argmax(-1) == labels).mean()),
                    "passes": float(exact(passes).mean()),
                }
            )
        return bands

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a checkpoint and the run that goes on from it."""
        settings = self.settings
        data = ("size", "train_nonzero", "batch_size")
        return super().identity() | {
            "model": asdict(settings.model),
            "data": {name: getattr(settings.dataset, name) for name in data},
        }


def _mean(bands: list[dict[str, Any]], name: str) -> float:
    return sum(band[name] for band in bands) / len(bands)
