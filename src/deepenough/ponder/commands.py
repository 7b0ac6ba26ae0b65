"""`deepenough ponder`: train, measure and use a classifier that ponders; learn parity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from deepenough.config import Command

if TYPE_CHECKING:
    from deepenough.ponder.config import PonderEvalConfig, PonderPredictConfig, PonderTrainConfig
    from deepenough.ponder.inference import Text
    from deepenough.ponder.parity import ParityTrainConfig


def train(config: PonderTrainConfig) -> None:
    """Train a classifier."""
    from transformers import AutoConfig

    from deepenough.ponder.config import options_of
    from deepenough.ponder.training import train
    from deepenough.training.distributed import is_main_process

    run = train(config)
    if is_main_process():
        saved = AutoConfig.from_pretrained(run.model, trust_remote_code=False)
        reason = getattr(saved, "exit_reason", "not chosen on validation examples")
        print(f"exit: {options_of(saved).exit_setting} ({reason})")
        print(f"model in {run.model}; next: deepenough ponder eval {run.path}")


def evaluate(config: PonderEvalConfig) -> None:
    """Measure a classifier and print what was found."""
    from deepenough.measurement import figure_lines
    from deepenough.ponder.evaluation import evaluate

    print(*figure_lines(evaluate(config)), sep="\n")
    print(f"next: deepenough ponder plot {config.run}")


def predict(config: PonderPredictConfig) -> None:
    """Print the answer to every line as a JSON object."""
    from deepenough.ponder.evaluation import predict

    for answer in predict(config.run, _texts(config.data), config.exit, config.batch_size):
        print(json.dumps(asdict(answer)), flush=True)


def _texts(file: str | None) -> Iterator[Text]:
    from deepenough.data.corpus import read_input_lines

    for line in read_input_lines(file):
        first, tab, second = line.partition("\t")
        yield (first, second) if tab else first


def parity(config: ParityTrainConfig) -> None:
    """Run the parity experiment."""
    from deepenough.ponder.parity import train_parity
    from deepenough.training.distributed import is_main_process

    run = train_parity(config)
    if is_main_process():
        print(f"next: deepenough ponder plot {run.path}")


COMMANDS = (
    Command(
        name="train",
        help="fine-tune a classifier that stops as soon as it is sure",
        config="deepenough.ponder.config:PonderTrainConfig",
        run=train,
        description="Fine-tune an encoder as a classifier that stops as soon as it is sure.",
        example="deepenough ponder train --data reviews.csv --out runs/ponder",
    ),
    Command(
        name="eval",
        help="measure its accuracy and passes",
        config="deepenough.ponder.config:PonderEvalConfig",
        run=evaluate,
        description="Measure a classifier that ponders: accuracy and passes of every way to stop.",
        example="deepenough ponder eval runs/ponder --threshold 0.7",
        positional=("run",),
    ),
    Command(
        name="predict",
        help="label lines of text as they come",
        config="deepenough.ponder.config:PonderPredictConfig",
        run=predict,
        description="Label texts: label, probability and passes of each line, as JSON lines.",
        example="deepenough ponder predict runs/ponder reviews.txt",
        positional=("run", "data"),
    ),
    Command(
        name="parity",
        help="PonderNet's experiment: learn parity, extrapolate to harder vectors",
        config="deepenough.ponder.parity:ParityTrainConfig",
        run=parity,
        description="Train a recurrent network that chooses its number of steps on parity, and\n"
        "measure it on harder vectors than it was trained on.",
        example="deepenough ponder parity --steps 2000 --out runs/parity",
    ),
)
