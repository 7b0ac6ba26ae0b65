"""`deepenough ponder`: train, measure and use a classifier that ponders; learn parity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from deepenough.config import Command

if TYPE_CHECKING:
    from deepenough.ponder.config import PonderEvalConfig, PonderPredictConfig, PonderTrainConfig
    from deepenough.ponder.parity import ParityTrainConfig


def train(config: PonderTrainConfig) -> str:
    """Train a classifier and return what its exit is and what can be done next."""
    from transformers import AutoConfig

    from deepenough.ponder.config import options_of
    from deepenough.ponder.training import train

    run = train(config)
    saved = AutoConfig.from_pretrained(run.model, trust_remote_code=False)
    reason = getattr(saved, "exit_reason", "not chosen on validation examples")
    exit_text = f"exit: {options_of(saved).exit_setting} ({reason})"
    return f"{exit_text}\nmodel in {run.model}; next: deepenough ponder eval {run.path}"


def evaluate(config: PonderEvalConfig) -> Iterator[str]:
    """Measure a classifier; yield what was found, and what can be done next."""
    from deepenough.measurement import figure_lines
    from deepenough.ponder.evaluation import evaluate

    yield from figure_lines(evaluate(config))
    yield f"next: deepenough ponder plot {config.run}"


def predict(config: PonderPredictConfig) -> Iterator[str]:
    """Yield the answer to every line as a JSON object."""
    from deepenough.data.corpus import read_input_lines
    from deepenough.ponder.evaluation import predict

    lines = (line.partition("\t") for line in read_input_lines(config.data))
    texts = ((first, second) if tab else first for first, tab, second in lines)
    for answer in predict(config.run, texts, config.exit, config.batch_size):
        yield json.dumps(asdict(answer))


def parity(config: ParityTrainConfig) -> str:
    """Run the parity experiment and return what can be done next."""
    from deepenough.ponder.parity import train_parity

    return f"next: deepenough ponder plot {train_parity(config).path}"


COMMANDS = (
    Command(
        name="train",
        help="fine-tune a classifier that stops as soon as it is sure",
        config="deepenough.ponder.config:PonderTrainConfig",
        run=train,
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
