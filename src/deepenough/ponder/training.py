"""Train a classifier that ponders on labelled texts.

The baselines are the same model with another objective: `last` is plain fine-tuning at full depth,
`weighted` is PABEE.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from deepenough.data.batches import LengthBatches
from deepenough.data.classification import EncodedExamples, LabelledTexts, open_classification
from deepenough.data.config import SINGLE_LABEL, ProblemType
from deepenough.data.corpus import candidates
from deepenough.errors import UserError
from deepenough.hf.loading import from_pretrained, load
from deepenough.measurement import content_of
from deepenough.ponder.config import (
    OPTIONS,
    BaseEncoderConfig,
    PonderConfig,
    PonderTrainConfig,
    options_of,
)
from deepenough.ponder.evaluation import all_passes, choose_exit, quality
from deepenough.ponder.modeling import (
    PonderAlbertForSequenceClassification,
    PonderClassifier,
    PonderEncoderForSequenceClassification,
)
from deepenough.runs import RunFolder
from deepenough.training.task import WEIGHTS, BatchLoss, Task
from deepenough.training.trainer import begin_run, fit_run

ALBERT = "albert"

logger = logging.getLogger("deepenough")


def train(config: PonderTrainConfig, texts: LabelledTexts | None = None) -> RunFolder:
    """Train a classifier and return its run folder; `texts` stand in the place of `config.data`."""
    accelerator = begin_run(config)
    texts = texts or open_classification(config.data, config.dataset)
    torch.manual_seed(config.train.seed)
    model, tokenizer = make_classifier(config.model, config.ponder, texts.labels, texts.problem)
    limit = config.dataset.token_limit(model.max_length)
    examples = {
        split: EncodedExamples(rows, tokenizer, limit, split)
        for split, rows in texts.splits.items()
    }
    task = ClassificationTask(model, tokenizer, examples, config, accelerator, texts.metrics)
    return fit_run(config, task, accelerator)


class ClassificationTask(Task):
    """Classification of texts as a task of the training loop."""

    unit = "examples"
    model: PonderClassifier
    deals_rows = True

    def __init__(
        self,
        model: PonderClassifier,
        tokenizer: Any,
        examples: Mapping[str, EncodedExamples],
        config: PonderTrainConfig,
        accelerator: Accelerator,
        metrics: Sequence[str],
    ) -> None:
        super().__init__(model, config.train, accelerator)
        self.tokenizer, self.examples = tokenizer, examples
        self.config, self.metrics = config, tuple(metrics)
        self.batches = LengthBatches(
            examples["train"].lengths, config.dataset.batch_size, config.train.seed
        )
        if config.ponder.exit_budget is not None and not len(examples.get("valid", ())):
            raise UserError(
                "ponder.exit_budget chooses the exit on validation examples, and there are none: "
                "leave it out, or raise dataset.valid_fraction."
            )
        if self.batches.batch_size % self.world_size:
            raise UserError(
                f"A batch of {self.batches.batch_size} examples cannot be divided among "
                f"{self.world_size} processes: make dataset.batch_size a multiple of that."
            )

    def batches_per_epoch(self) -> int:
        """Return how many batches make one round over the training examples."""
        return len(self.batches)

    def gathered_layers(self) -> list[nn.Module]:
        """Return the layers of the encoder, one a pass."""
        return list(self.model.stack.layers)

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return parameter groups: matrices decay, vectors do not; heads may learn faster."""
        encoder = {id(parameter) for parameter in self.model.encoder_model.parameters()}
        groups: list[dict[str, Any]] = []
        for is_head in (False, True):
            own = [p for p in self.model.parameters() if (id(p) not in encoder) == is_head]
            scale = self.config.head_lr if is_head else 1.0
            matrices = {"params": [p for p in own if p.dim() > 1], "lr_scale": scale}
            vectors = {"params": [p for p in own if p.dim() <= 1], "lr_scale": scale}
            groups += [matrices, vectors | {"weight_decay": 0.0}]
        return {WEIGHTS: [group for group in groups if group["params"]]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of this process's share of a batch."""
        rows = self.batches.rows(step * self.config.train.accumulate + micro)
        batch = self.examples["train"].batch(rows, self.model.device)
        # Every other one: neighbours are of a length, so processes get like work.
        own = {name: column[self.rank :: self.world_size] for name, column in batch.items()}
        output = model(**own)
        self.terms = {name: float(term.detach()) for name, term in output.terms.items()}
        return BatchLoss(output.loss, output.terms["task"], len(own["labels"]))

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return loss, scores and mean passes with the exit of the model's own settings."""
        examples = self.examples.get(split)
        if examples is None or not len(examples):
            return {}
        if split == "test":
            self.choose_exit()
        answers = all_passes(self.model, examples, accelerator, self.metrics)
        return quality(answers, self.model.exit_policy())

    def choose_exit(self) -> None:
        """Give the trained model the exit that is best on validation examples, if none is named."""
        config, examples = self.model.config, self.examples.get("valid")
        options, usual = options_of(config), vars(PonderConfig())
        is_usual = (value == usual[name] for name, value in vars(options).items() if "exit" in name)
        is_open = options.exit_budget is not None or all(is_usual)
        if is_open and examples is not None and len(examples):
            answers = all_passes(self.model, examples, metrics=self.metrics)
            options, reason = choose_exit(answers, options)
            vars(config).update(asdict(options), exit_reason=reason)
            logger.info("exit: %s (%s)", options.exit_setting, reason)

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a checkpoint and the run that goes on from it."""
        own, data = self.model.config, self.config.dataset
        options = {name: getattr(own, name) for name in OPTIONS if not name.startswith("exit")}
        return super().identity() | {
            "model": {"architecture": own.model_type, "head_lr": self.config.head_lr} | options,
            "data": {"batch_size": data.batch_size, "max_length": data.max_length}
            | {split: _content(examples) for split, examples in self.examples.items()},
        }

    def save(self, folder: Path) -> None:
        """Write model, with the exit that suits it, and tokenizer in Hugging Face form."""
        self.choose_exit()
        super().save(folder)


def _content(examples: EncodedExamples) -> str:
    rows = zip(examples.columns["input_ids"], examples.labels, strict=True)
    return f"{len(examples)} examples ({content_of(rows)})"


# -- a new model -----------------------------------------------------------------------------------


def make_classifier(
    encoder: BaseEncoderConfig,
    ponder: PonderConfig,
    labels: Sequence[str],
    problem: ProblemType = SINGLE_LABEL,
) -> tuple[PonderClassifier, Any]:
    """Return a new model, over an encoder's weights or a config alone, and its tokenizer.

    Weights that are new are drawn from torch's generator.
    """
    options: dict[str, Any] = asdict(ponder) | {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": problem,
    }
    base: Any
    if encoder.encoder.endswith(".json"):
        path, tokenizer = Path(encoder.encoder).expanduser(), None
        if not path.is_file():
            raise UserError(
                f"There is no config file {encoder.encoder}: give one that AutoConfig reads."
            )
        config = from_pretrained(
            AutoConfig, str(path), "config", encoder.encoder, trust_remote_code=None
        )
        base = None if config.model_type == ALBERT else AutoModel.from_config(config)
    else:
        base, tokenizer = load(
            encoder.encoder, kind="encoder", revision=encoder.revision, trust_remote_code=None
        )
        config = base.config
    if encoder.tokenizer is not None:
        tokenizer = _load_tokenizer(encoder.tokenizer, config.model_type)
    if tokenizer is None:
        raise UserError(
            f"The config {encoder.encoder} comes without a tokenizer: give model.tokenizer."
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens, but the encoder's vocabulary only "
            f"{config.vocab_size}: give the tokenizer that belongs to it."
        )
    model: PonderClassifier
    if config.model_type == ALBERT:
        model = PonderAlbertForSequenceClassification(config, tokenizer, **options)
        if base is not None:
            model.albert.load_state_dict(base.state_dict())
    else:
        model = PonderEncoderForSequenceClassification.from_encoder(base, **options)
    if encoder.dropout is not None:
        for part in model.encoder_model.modules():
            if isinstance(part, nn.Dropout):
                part.p = encoder.dropout
    return model, tokenizer


def _load_tokenizer(name: str, model_type: str) -> Any:
    """Load a tokenizer by folder or hub name, or from a bare vocabulary of BERT or ALBERT."""
    place = next((str(path) for path in candidates(name) if path.is_dir()), name)
    folder = Path(place)
    bare = folder.is_dir() and not (folder / "tokenizer_config.json").is_file()
    options: dict[str, Any] = {"name": name, "trust_remote_code": None}
    if bare:  # nothing there says whose tokenizer it is, so the encoder does
        options["config"] = AutoConfig.for_model(model_type)
    return from_pretrained(AutoTokenizer, place, "tokenizer", **options)
