"""`Task`: what a method tells the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.training.config import TrainingConfig
from deepenough.training.distributed import mean_of_all, place_among
from deepenough.training.logging import without_bars

WEIGHTS = "weights"


class BatchLoss(NamedTuple):
    """The loss of one batch on this process."""

    objective: Tensor
    """What is minimised."""
    loss: Tensor
    """What is recorded: the same without the terms that are no measure of quality."""
    units: int
    """Tokens or examples in the batch."""


class Task(ABC):
    """A model, its data and its loss, as the training loop needs them.

    What most tasks have in common is answered here: one optimiser that decays matrices and not
    vectors, nothing to do between steps, no state that follows the data.
    """

    unit: str
    """What the progress bar counts: tokens, examples."""
    model: Any
    tokenizer: Any = None
    """What is saved with the model, where it reads text."""
    terms: Mapping[str, float] = MappingProxyType({})
    """The terms of the last loss on this process, which are recorded beside it."""
    is_warm = False
    """Whether the model began with the weights of another."""
    phase = WEIGHTS
    """Name of the one optimiser."""
    deals_rows = False
    """Whether processes are dealt the rows of one batch in turn, padded alike. On a CPU they then
    drop what one process would; else each draws a dropout of its own."""

    def __init__(self, model: Any, train: TrainingConfig, accelerator: Accelerator) -> None:
        self.model, self.train, self.accelerator = model, train, accelerator
        self.rank, self.world_size = place_among(accelerator)

    def weights(self) -> list[nn.Parameter]:
        """Return the parameters that the one optimiser trains."""
        return list(self.model.parameters())

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups of each optimiser; `lr_scale` scales a group's rate."""
        own = self.weights()
        matrices = {"params": [p for p in own if p.dim() > 1]}
        vectors = {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0}
        return {self.phase: [matrices, vectors]}

    def gathered_layers(self) -> list[nn.Module]:
        """Return the parts whose weights are gathered one at a time where the model is divided.

        Each of them must run exactly once in a forward pass, whatever the batch.
        """
        return []

    def undivided(self) -> list[nn.Parameter]:
        """Return weights that are read between steps, so that every process keeps them whole."""
        return []

    def batches_per_epoch(self) -> int:
        """Return how many batches make one round over the training data."""
        raise UserError("This training makes its data as it goes: give train.steps, not epochs.")

    def begin_step(self, step: int) -> None:  # noqa: B027 - most tasks need not
        """Prepare for a step, such as by following a schedule."""

    def phases(self, step: int) -> Sequence[str]:
        """Return the optimisers that make this step, in order; the first one's loss is recorded."""
        return (self.phase,)

    @abstractmethod
    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss on one batch; `micro` counts the batches of the step."""

    def end_step(self) -> None:  # noqa: B027 - as above
        """Do what follows a step."""

    def train_values(self) -> dict[str, Any]:
        """Return what to record beside the loss: the means of its terms over all processes."""
        return mean_of_all(self.accelerator, self.terms) if self.terms else {}

    @abstractmethod
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the quality on a split, nothing where there is no such split."""

    def is_converged(self) -> bool:
        """Return whether training ends here; asked after every validation."""
        return False

    def state(self) -> dict[str, Tensor]:
        """Return the state that follows the data, stream by stream along the first axis."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027 - as above
        """Take up the state of this process's streams; the model's weights are loaded before."""

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a checkpoint and the run that goes on from it."""
        return {"train": self.train.identity(), "start": {"warm": self.is_warm}}

    def save(self, folder: Path) -> None:
        """Write the model, and its tokenizer if it has one, in Hugging Face form."""
        from deepenough.data.tokenizer import save_tokenizer  # which loads SentencePiece

        with without_bars():
            self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, folder)
