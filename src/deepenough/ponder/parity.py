"""PonderNet's parity experiment, with ACT and fixed depth beside it (arXiv 2107.05407, 4.1).

**Task** (ACT, arXiv 1603.08983, section 3.1). An input is a vector of `size` entries. Some of them,
at random places, are 1 or -1, the others 0; the label is 1 if the number of ones is odd. How many
entries are not zero is the difficulty of the input: a model that is trained on few and measured on
more has to have found a procedure, not a table. Batches are a function of their seed, so that a
training can be resumed anywhere.

**Network.** One GRU cell is applied again and again to the same input; after each pass a classifier
gives `y_n` and a halting unit the logit of `lambda_n`. Mechanisms:

- `ponder`: PonderNet. Its loss is the expectation over passes; it answers with the pass at which it
  halts, the first one whose cumulative halting probability reaches one half.
- `act`: Adaptive Computation Time; it answers with a weighted mean of passes.
- `fixed`: always all passes; it answers with the last one.

How the vector enters the cell is a choice. `vector` gives it as it is, as the paper does: every
entry has weights of its own, and the network has to find out that entries are alike. `entries`
gives two numbers, the sum of the positive and that of the negative parts of all entries, so that
this is known beforehand and what is left to learn is the procedure itself.

**Measurement.** Accuracy and passes by difficulty, in bands of the number of non-zero entries,
those of training and those beyond. The model may make more passes there than in training.

Shapes: B inputs, D entries, N passes, H width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from deepenough.config import RunConfig, bounded, validate
from deepenough.errors import UserError
from deepenough.nn.adaptive_computation_time import act_halting
from deepenough.ponder.config import check_choices
from deepenough.ponder.figures import PARITY
from deepenough.ponder.halting import (
    SINGLE_LABEL,
    PonderLoss,
    answer_loss,
    fixed_loss,
    log_halting,
    ponder_loss,
)
from deepenough.runs import Record, RunFolder, append_record, read_records
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import make_accelerator, on_main
from deepenough.training.logging import without_bars
from deepenough.training.task import WEIGHTS, BatchLoss, Task
from deepenough.training.trainer import check_folder, training

INPUT_DECAY = 1.0
"""Weight decay of the weights that read the input. It takes away what does not matter, such as the
number of entries that are -1, and without that nothing holds beyond what was trained."""

NUM_LABELS = 2
HALF = 0.5


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

    input: Literal["entries", "vector"] = "entries"
    """How the vector enters: as a sum over its entries, or as it is, which is harder to learn."""

    width: int = bounded(64, ge=1)
    """Width of the recurrent state."""

    max_passes: int = bounded(20, ge=1)
    """Passes in training."""

    eval_passes: int | None = bounded(None, ge=1)
    """Passes at most when measuring; by default those of training, which `fixed` always makes."""

    halting_target: float = bounded(0.3, gt=0, lt=1)
    """Halting probability of the geometric prior, lambda_p; its inverse is the prior's mean."""

    kl_weight: float = bounded(0.1, ge=0)
    """Weight of the divergence from the prior, beta."""

    act_cost: float = 0.001
    """What a pass costs Adaptive Computation Time, tau."""

    def check(self) -> None:
        """Refuse unknown choices."""
        check_choices(self)


@dataclass
class ParityTrainConfig(RunConfig):
    """A network that learns parity."""

    METHOD: ClassVar[str] = "ponder"

    dataset: ParityDataConfig = field(default_factory=ParityDataConfig)
    model: ParityModelConfig = field(default_factory=ParityModelConfig)
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


class ParityConfig(PreTrainedConfig):
    """Config of the parity network: its input's `size` and the fields of `ParityModelConfig`."""

    model_type = "deepenough-parity"

    def __init__(self, size: int = 16, **kwargs: Any) -> None:
        names = [option.name for option in fields(ParityModelConfig) if option.name in kwargs]
        model = validate(ParityModelConfig(**{name: kwargs.pop(name) for name in names}))
        super().__init__(**kwargs)
        self.size = size
        for name, value in vars(model).items():
            setattr(self, name, value)


# -- task ------------------------------------------------------------------------------------------


class ParityBatch(NamedTuple):
    """B inputs of D entries."""

    vectors: Tensor
    """[B, D] of -1, 0 and 1, as floats."""
    labels: Tensor
    """[B], 1 where the number of ones is odd."""
    nonzero: Tensor
    """[B], how many entries are not zero: the difficulty."""


def parity_batch(num: int, size: int, lowest: int, highest: int, seed: int) -> ParityBatch:
    """Return `num` inputs, each with a number of non-zero entries drawn from lowest..highest."""
    if not 1 <= lowest <= highest <= size:
        raise ValueError(f"no vector of {size} entries has {lowest} to {highest} that are not 0")
    generator = torch.Generator().manual_seed(seed)
    nonzero = torch.randint(lowest, highest + 1, (num, 1), generator=generator)
    # The ranks of random numbers: a random place in the order for every entry of a vector.
    ranks = torch.rand(num, size, generator=generator).argsort(1).argsort(1)
    signs = torch.randint(0, 2, (num, size), generator=generator) * 2 - 1
    vectors = torch.where(ranks < nonzero, signs, 0)
    labels = (vectors == 1).sum(1) % 2
    return ParityBatch(vectors.float(), labels, nonzero[:, 0])


def parity_ref(vector: Sequence[float]) -> int:
    """Return the label of one vector, straight from its definition."""
    label = 0
    for entry in vector:
        if entry == 1:
            label = 1 - label
    return label


# -- network ---------------------------------------------------------------------------------------


class ParityPasses(NamedTuple):
    """What every pass says."""

    logits: Tensor
    """[N, B, 2]."""
    halt_logits: Tensor
    """[B, N], of `lambda_n`."""


class ParityAnswer(NamedTuple):
    """What the network says in the end."""

    logits: Tensor
    """[B, 2]."""
    passes: Tensor
    """[B], how many passes were made for each input."""


class ParityModel(PreTrainedModel):
    """A GRU cell that is applied to the same input until it halts."""

    config_class = ParityConfig
    main_input_name = "vectors"

    def __init__(self, config: ParityConfig) -> None:
        super().__init__(config)
        width = config.width
        self.cell = nn.GRUCell(2 if config.input == "entries" else config.size, width)
        self.classifier = nn.Linear(width, NUM_LABELS)
        self.halt = nn.Linear(width, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep torch's initial weights, but for halting: a new model halts as the prior does."""
        if module is self.halt:
            target = self.config.halting_target
            init.constant_(self.halt.bias, math.log(target) - math.log1p(-target))

    def forward(self, vectors: Tensor, num_passes: int | None = None) -> ParityPasses:
        """Make all passes, as many as in training unless told otherwise."""
        num_passes = num_passes or self.config.max_passes
        # The input is the same at every pass, and so is its part of the gates.
        gates = nn.functional.linear(self._encode(vectors), self.cell.weight_ih, self.cell.bias_ih)
        input_reset, input_update, input_new = gates.chunk(3, -1)
        hidden = gates.new_zeros(len(vectors), self.config.width)
        states = []
        for _ in range(num_passes):
            own = nn.functional.linear(hidden, self.cell.weight_hh, self.cell.bias_hh)
            own_reset, own_update, own_new = own.chunk(3, -1)
            reset = torch.sigmoid(input_reset + own_reset)
            update = torch.sigmoid(input_update + own_update)
            new = torch.tanh(input_new + reset * own_new)
            hidden = torch.lerp(new, hidden, update)
            states.append(hidden)
        states_NBH = torch.stack(states)
        return ParityPasses(self.classifier(states_NBH), self.halt(states_NBH)[..., 0].T)

    def _encode(self, vectors: Tensor) -> Tensor:
        if self.config.input == "vector":
            return vectors
        parts = torch.stack([vectors.clamp(min=0).sum(-1), -vectors.clamp(max=0).sum(-1)], -1)
        return parts / math.sqrt(self.config.size)

    # -- the three mechanisms ----------------------------------------------------------------

    def loss(self, passes: ParityPasses, labels: Tensor) -> PonderLoss:
        """Return the loss of the mechanism; of ACT, `kl` is the mean cost of its passes."""
        config, logits = self.config, passes.logits
        num_passes = len(logits)
        if config.mechanism == "ponder":
            log_p = log_halting(passes.halt_logits, num_passes)
            return ponder_loss(
                logits, log_p, labels, SINGLE_LABEL, config.halting_target, config.kl_weight
            )
        if config.mechanism == "fixed":
            last = torch.zeros(num_passes)
            last[-1] = 1.0
            return fixed_loss(logits, last, labels, SINGLE_LABEL)
        halting = act_halting(passes.halt_logits)
        answer = torch.einsum("bn,nbc->bc", halting.weights, logits)
        task, cost = answer_loss(answer, labels, SINGLE_LABEL), halting.cost.mean()
        return PonderLoss(task + config.act_cost * cost, task, cost)

    def answer(self, passes: ParityPasses, threshold: float = HALF) -> ParityAnswer:
        """Return what the model says, and after how many passes."""
        logits, num_passes = passes.logits, len(passes.logits)
        if self.config.mechanism == "act":
            halting = act_halting(passes.halt_logits)
            return ParityAnswer(torch.einsum("bn,nbc->bc", halting.weights, logits), halting.passes)
        if self.config.mechanism == "fixed":
            return ParityAnswer(
                logits[-1], torch.full_like(passes.halt_logits[:, 0].long(), num_passes)
            )
        reached = log_halting(passes.halt_logits, num_passes).exp().cumsum(-1)
        index = (reached < threshold).sum(-1).clamp(max=num_passes - 1)
        return ParityAnswer(logits[index, torch.arange(len(index), device=index.device)], index + 1)


# -- experiment ------------------------------------------------------------------------------------


def train_parity(settings: ParityTrainConfig) -> RunFolder:
    """Train a network on parity, measure it by difficulty, and return its run folder."""
    validate(settings)
    accelerator = make_accelerator(settings.train)
    if settings.dataset.batch_size % accelerator.num_processes:
        raise UserError(
            f"dataset.batch_size {settings.dataset.batch_size} cannot be divided "
            f"among {accelerator.num_processes} processes: give a multiple of that."
        )
    check_folder(settings, accelerator)
    torch.manual_seed(settings.train.seed)
    config = ParityConfig(settings.dataset.size, **asdict(settings.model))
    task = ParityTask(ParityModel(config), settings, accelerator)
    with training(settings, task, accelerator) as trainer:
        trainer.fit()
    on_main(accelerator, lambda: _record_difficulty(task, trainer.run))
    return trainer.run


def _record_difficulty(task: ParityTask, run: RunFolder) -> None:
    """Write one record a band, for the picture of accuracy and passes against difficulty."""
    if any(record.kind == PARITY for record in read_records(run.metrics)[0]):
        return  # the run was finished before
    train = task.settings.train
    for band in task.measure(seed_at(train.seed, "final")):
        append_record(run.metrics, Record(train.steps, PARITY, band))


class ParityTask(Task):
    """Parity as a task of the training loop."""

    unit = "inputs"
    model: ParityModel

    def __init__(
        self, model: ParityModel, settings: ParityTrainConfig, accelerator: Accelerator
    ) -> None:
        self.model, self.settings = model, settings
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.terms: dict[str, float] = {}

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups, which differ in weight decay."""
        reading = self.model.cell.weight_ih
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
            tensor.chunk(self.world_size)[self.rank].to(self.model.device)
            for tensor in (batch.vectors, batch.labels)
        )
        loss = self.model.loss(model(vectors), labels)
        self.terms = {"task": float(loss.task.detach()), "kl": float(loss.kl.detach())}
        return BatchLoss(loss.total, loss.task, len(labels))

    def train_values(self) -> dict[str, Any]:
        """Return the terms of the last loss."""
        return self.terms

    # -- measuring ---------------------------------------------------------------------------

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return quality on the bands of training, and on those beyond."""
        if split != "valid":
            return {}
        data = self.settings.dataset
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
        """Return accuracy, loss and passes of every band of difficulty."""
        data = self.settings.dataset
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
        """Return what must not change between a checkpoint and the run that goes on from it."""
        settings = self.settings
        data = ("size", "train_nonzero", "batch_size")
        return {
            "model": {k: v for k, v in asdict(settings.model).items() if k != "eval_passes"},
            "data": {name: getattr(settings.dataset, name) for name in data},
            "train": settings.train.identity(),
        }

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face form."""
        with without_bars():
            self.model.save_pretrained(folder)


@torch.no_grad()
def measure_parity(model: ParityModel, batch: ParityBatch, num_passes: int) -> dict[str, Any]:
    """Return loss, accuracy and passes of a batch."""
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
