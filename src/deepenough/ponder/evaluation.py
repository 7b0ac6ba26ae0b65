"""Use of a classifier that ponders: measure it, or let it label texts as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from deepenough.config import resolve
from deepenough.data.classification import (
    ClassificationData,
    LabelledTexts,
    open_classification,
    with_dataset,
)
from deepenough.data.encoded_examples import EncodedExamples
from deepenough.errors import UserError
from deepenough.ponder import measure as measure
from deepenough.ponder.config import options_of
from deepenough.ponder.model import PonderClassifier
from deepenough.ponder.policies import ExitPolicy, FixedExit, make_policy
from deepenough.ponder.settings import Exit, check_settings
from deepenough.ponder.texts import Text
from deepenough.ponder.timing import time_exits, time_records
from deepenough.ponder.training import PonderTraining, token_limit
from deepenough.runs import Metrics, RunFolder, model_folder, read_records
from deepenough.training.logging import without_bars

ALL_PASSES, OWN_EXIT = "all passes", "own exit"
SPLITS = ("valid", "test", "train")
EXITS_OF: dict[str, tuple[Exit, ...]] = {
    "threshold": ("quantile", "confidence"),
    "patience": ("patience",),
    "passes": ("fixed",),
    "seed": ("sampled",),
}
"""Which exits read an option."""


@dataclass
class ExitSettings:
    """When to stop; by default as the model was told to when it was trained"""

    exit: Exit | None = None
    """quantile, sampled, confidence, patience or fixed."""

    threshold: float | None = None
    """Probability of having halted at which the quantile exit stops, or of the answer at which the
    confidence exit does, in (0, 1]."""

    patience: int | None = None
    """How often an answer is repeated before the patience exit stops."""

    passes: int | None = None
    """Passes of the fixed exit."""

    seed: int | None = None
    """Seed of the sampled exit."""

    def policy(self, model: PonderClassifier) -> ExitPolicy:
        given: dict[str, Any] = {
            "exit": self.exit,
            "exit_threshold": self.threshold,
            "exit_patience": self.patience,
            "exit_pass": self.passes,
            "exit_seed": self.seed,
        }
        known = {name: value for name, value in given.items() if value is not None}
        options = replace(options_of(model.config), **known)
        options = replace(options, exit=self._kind(options.exit))
        check_settings(options, model.num_passes, shared=True)
        return make_policy(options, model.config.problem_type)

    def _kind(self, usual: Exit) -> Exit:
        """The exit asked for, by name or by an option that it alone reads."""
        named = [name for name in EXITS_OF if getattr(self, name) is not None]
        exits = [self.exit] if self.exit else list(EXITS_OF[named[0]]) if named else [usual]
        kind: Exit = usual if usual in exits else exits[0]
        for name in named:
            if kind not in EXITS_OF[name]:
                raise UserError(
                    f"exit.{name} is of use with the exit {' or '.join(EXITS_OF[name])}, not with "
                    f"{kind}: leave it out, or give --exit.exit."
                )
        return kind


@dataclass
class PonderEvaluation:
    """How well a classifier does, and how many passes it takes."""

    run: str
    """Folder of a finished training."""

    dataset: str | None = None
    """Examples to measure on, named as for training; by default those it was trained with."""

    split: str | None = None
    """Split of them; by default valid, else test, else all there are."""

    exit: ExitSettings = field(default_factory=ExitSettings)

    time: bool = True
    """Measure seconds as well, with stopping and without."""

    batch_size: int = 32
    """Examples in one batch when seconds are measured."""


def load_classifier(folder: str) -> tuple[PonderClassifier, Any]:
    """The model and the tokenizer of a finished run, or of a folder in Hugging Face form."""
    path = model_folder(folder)
    try:
        with without_bars():
            model = AutoModelForSequenceClassification.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"The model in {folder} cannot be loaded: {reason}.") from error
    if not isinstance(model, PonderClassifier):
        raise UserError(
            f"The model in {folder} is a {type(model).__name__}, which does not ponder: give the "
            "folder of `deepenough ponder train`."
        )
    return model.eval(), tokenizer


def predict(
    run: str,
    texts: Iterable[Text],
    exit: ExitSettings | None = None,
    *,
    truncate: bool = True,
    rows: int = 32,
) -> Iterator[dict[str, Any]]:
    """Label, probability and passes of each text, in their order, as they are decided; a text that
    is empty has no label."""
    model, tokenizer = load_classifier(run)
    policy = (exit or ExitSettings()).policy(model)
    config = RunFolder(model_folder(run).parent).config
    limit = None
    if truncate and config.is_file():  # as in training, and so as it was measured
        limit = token_limit(model, resolve(PonderTraining, config).data)
    empty: deque[int] = deque()  # places of the texts that the model is not asked about
    place = 0
    said = _saying_something(texts, empty)
    for answer in model.predict(said, tokenizer, policy, truncate, rows, limit):
        while empty and empty[0] == place:
            yield _answer(None, None, 0)
            place = empty.popleft() + 1
        yield _answer(answer.label, answer.probability, answer.passes)
        place += 1
    yield from (_answer(None, None, 0) for _ in empty)


def _answer(label: Any, probability: Any, passes: int) -> dict[str, Any]:
    return {"label": label, "probability": probability, "passes": passes}


def _saying_something(texts: Iterable[Text], empty: deque[int]) -> Iterator[Text]:
    for place, text in enumerate(texts):
        if all(part.strip() for part in ([text] if isinstance(text, str) else text)):
            yield text
        else:
            empty.append(place)


def evaluate(
    run: str, data: str | None = None, settings: PonderEvaluation | None = None
) -> dict[str, Any]:
    """Accuracy and passes with the exit asked for, and seconds beside those of all passes.

    The whole frontier, and all that the pictures need, goes into the run's metrics.jsonl.
    """
    settings = settings or PonderEvaluation(run, data)
    if settings.batch_size < 1:
        raise UserError(f"batch_size must be at least 1: got {settings.batch_size}.")
    model, tokenizer = load_classifier(run)
    policy = settings.exit.policy(model)
    folder = RunFolder(model_folder(run).parent)
    names: Any = model.config.id2label
    labels = [names[number] for number in range(model.num_labels)]
    texts, trained_on = _texts(folder, settings.dataset, labels)
    split = settings.split or next(name for name in SPLITS if name in texts.splits)
    rows = texts.split(split)
    examples = EncodedExamples(rows, tokenizer, token_limit(model, trained_on), split)
    answers = measure.all_passes(model, examples)
    values: dict[str, Any] = {"split": split, "examples": len(rows)}
    values |= measure.quality(answers, policy)
    step, number = _place(folder)
    about = {
        "model": model.config.objective,
        "data": texts.name,
        "split": split,
        "evaluation": number,
    }
    shown = [f"{row.text} | {row.pair}" if row.pair else row.text for row in rows]
    records = measure.records(answers, policy, labels, shown, step=step, about=about)
    if settings.time:
        policies = {OWN_EXIT: policy, ALL_PASSES: FixedExit()}
        timed = time_exits(model, examples, policies, batch_size=settings.batch_size)
        records += time_records(timed, step=step, about=about)
        values["seconds"] = timed[OWN_EXIT]["seconds"]
        values["seconds_all_passes"] = timed[ALL_PASSES]["seconds"]
    if folder.is_run():
        metrics = Metrics(folder.metrics)
        for record in records:
            metrics.append(record)
    return values


def _texts(
    folder: RunFolder, dataset: str | None, labels: Sequence[str]
) -> tuple[LabelledTexts, ClassificationData]:
    """The examples to measure on, and the settings that the training had for its own."""
    data = ClassificationData()
    if folder.config.is_file():
        data = resolve(PonderTraining, folder.config).data
    elif dataset is None:
        raise UserError("Nothing tells what the model was trained on: give --dataset.")
    if dataset is not None and dataset != data.dataset:
        data = with_dataset(data, dataset)
    return open_classification(data, labels), data


def _place(folder: RunFolder) -> tuple[int, int]:
    """The step of the run's last record, and the number of this evaluation among its own."""
    if not folder.metrics.is_file():
        return 0, 1
    records, _ = read_records(folder.metrics)
    step = max((record.step for record in records), default=0)
    return step, 1 + max((record.values.get("evaluation", 0) for record in records), default=0)
