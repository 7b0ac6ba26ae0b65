"""Error and steps on bAbI's twenty tasks, of a small pondering encoder and a Universal Transformer.

Two encoders of one shared layer are trained on all twenty tasks at once, with 1,000 questions a
task and the same data, weights to begin with and steps: one ponders, the other halts by adaptive
computation time, as the Universal Transformer does (arXiv 1807.03819). Error and mean passes of
each are measured on the 1,000 test questions of every task. PonderNet's published errors are of
10,000 questions a task and of models many times this size and training: nothing here speaks about
them. Exits are chosen on held-out training questions. What is finished is left alone when the
command is given again, and what was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from deepenough.config import resolve
from deepenough.data.classification import EncodedExamples, LabelledTexts, open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.data.tasks import NUM_TASKS
from deepenough.nn.layers import act_halting
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.evaluation import AllPasses, all_passes, load_classifier, quality
from deepenough.ponder.modeling import PonderAlbertForSequenceClassification
from deepenough.ponder.training import ClassificationTask, make_classifier
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import training

QUICK = False
SEEDS = [0]
MODELS = ("ponder", "universal")
WORD = r"\w+|[^\w\s]"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MAX_LENGTH = 192
"""Tokens of a story and its question: of longer stories the oldest statements are left out."""
TIME_COST = 0.001
"""Weight of the passes in the loss of the Universal Transformer."""
CERTAIN = 1e4
"""Logit of halting at the last pass."""
LAYER: dict[str, Any] = {
    "model_type": "albert",
    "embedding_size": 96,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
}


class UniversalClassifier(PonderAlbertForSequenceClassification):
    """The same shared layer, halting by adaptive computation time."""

    def _run_all(self, inputs: Any, labels: Any, policy: Any, example_ids: Any) -> Any:
        """Make every pass; the answer is the mean of all, weighted by the halting decisions."""
        output = super()._run_all(inputs, None, policy, example_ids)
        if labels is not None:
            mixed, _, cost = universal(output.step_logits, output.halt_logits)
            task = F.cross_entropy(mixed, labels)
            output.loss = task + TIME_COST * cost.mean()
            output.terms = {"task": task, "kl": cost.mean()}
        return output


def universal(step_logits_NBC: Tensor, halt_logits_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return answers `[B, C]`, passes `[B]` and cost `[B]` of adaptive computation time."""
    halting = act_halting(F.pad(halt_logits_BN, (0, 1), value=CERTAIN))
    mixed = (halting.weights.T[..., None] * step_logits_NBC).sum(0)
    return mixed, halting.passes, halting.cost


def measure(
    runs: str = "runs/ponder-babi",
    epochs: float = 45.0,
    passes: int = 8,
    tasks: Sequence[int] = tuple(range(1, NUM_TASKS + 1)),
    limit: int | None = None,
    seeds: Sequence[int] = SEEDS,
    threads: int = 1,
) -> dict[str, Any]:
    """Train what is missing and return error and passes by task.

    Args:
        runs: Folder of the runs.
        epochs: Rounds over the training questions of all tasks.
        passes: Most passes over the layer.
        tasks: Tasks that are trained on together.
        limit: Questions of each split and task, for a trial.
        seeds: Seeds of the trainings.
        threads: Threads of all that is computed.
    """
    torch.set_num_threads(threads)
    by_task = {task: read_task(task, limit) for task in tasks}
    texts = join(list(by_task.values()))
    tokenizer = make_tokenizer(texts, Path(runs) / "tokenizer")
    results: dict[str, Any] = {}
    for seed in seeds:
        own: dict[str, Any] = {}
        for name in MODELS:
            folder = Path(runs) / f"{name}-{seed}"
            fine_tune(folder, name, seed, texts, tokenizer, passes, epochs)
            own[name] = errors(folder, name, by_task, texts)
        results[f"seed_{seed}"] = own
    num = {split: len(rows) for split, rows in texts.splits.items()}
    settings = {"layer": LAYER, "passes": passes, "epochs": epochs, "examples": num}
    return {**results, "settings": settings | {"seeds": list(seeds), "tasks": list(tasks)}}


def read_task(task: int, limit: int | None) -> LabelledTexts:
    """Return one task, a tenth of its training questions held out."""
    texts = open_classification(f"babi:{task}", ClassificationConfig(valid_fraction=0.1))
    return replace(texts, splits={name: rows[:limit] for name, rows in texts.splits.items()})


def join(parts: Sequence[LabelledTexts]) -> LabelledTexts:
    """Return all tasks as one, with the answers of all."""
    labels = tuple(sorted({label for part in parts for label in part.labels}))
    splits = {
        split: [
            row._replace(label=labels.index(part.labels[int(row.label)]))  # type: ignore[arg-type]
            for part in parts
            for row in part.splits[split]
        ]
        for split in ("train", "valid", "test")
    }
    return LabelledTexts("babi", splits, labels)


def make_tokenizer(texts: LabelledTexts, folder: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, which keeps the end of a story that is too long."""
    rows = texts.splits["train"]
    words = {word for row in rows for word in re.findall(WORD, f"{row.text} {row.pair}".lower())}
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = Lowercase()
    core.pre_tokenizer = Split(Regex(WORD), "removed", invert=True)
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        truncation_side="left",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def fine_tune(
    folder: Path,
    name: str,
    seed: int,
    texts: LabelledTexts,
    tokenizer: PreTrainedTokenizerFast,
    passes: int,
    epochs: float,
) -> None:
    """Train one model, unless it is finished."""
    if (folder / "model").is_dir():
        return
    encoder = folder.parent / "encoder.json"
    layer = {**LAYER, "vocab_size": len(tokenizer), "num_hidden_layers": passes, "pad_token_id": 0}
    encoder.write_text(json.dumps(layer))
    given = {
        "out": str(folder),
        "resume": folder.exists(),
        "epochs": epochs,
        "head_lr": 1.0,
        "dataset.batch_size": 64,
        "dataset.max_length": MAX_LENGTH,
        "model.encoder": str(encoder),
        "model.tokenizer": str(folder.parent / "tokenizer"),
        "ponder.pooling": "cls",
        "ponder.halting_head": "previous",
        "ponder.halting_target": 0.2,
        "ponder.kl_weight": 0.01,
        "ponder.distill": 0.0,
        "train.seed": seed,
        "train.lr": 1e-3,
        "train.warmup": 0.05,
        "train.schedule": "cosine",
        "train.log_every": 100,
        "train.valid_every": 1000,
        "train.save_every": 500,
    }
    config = resolve(PonderTrainConfig, overrides=given)
    accelerator = make_accelerator(config.train)
    torch.manual_seed(seed)
    model, _ = make_classifier(config.model, config.ponder, texts.labels)
    if name == "universal":
        model.__class__ = UniversalClassifier  # the same weights to begin with
    examples = {
        split: EncodedExamples(texts.splits[split], tokenizer, MAX_LENGTH, split)
        for split in ("train", "valid")
    }
    task = ClassificationTask(model, tokenizer, examples, config, accelerator, texts.metrics)
    with training(config, task, accelerator) as trainer:
        trainer.fit()


def errors(
    folder: Path, name: str, by_task: dict[int, LabelledTexts], texts: LabelledTexts
) -> dict[str, Any]:
    """Return error and mean passes on the test questions of every task, and of all tasks."""
    model, tokenizer = load_classifier(str(folder))
    found: dict[str, Any] = {}
    first = 0
    for task, part in by_task.items():
        num = len(part.splits["test"])
        rows = texts.splits["test"][first : first + num]
        first += num
        answers = all_passes(model, EncodedExamples(rows, tokenizer, MAX_LENGTH, f"task {task}"))
        found[f"task_{task}"] = judge(answers, name, model)
    shares = list(found.values())
    found["mean"] = {
        key: sum(each[key] for each in shares) / len(shares) for key in ("error_share", "passes")
    }
    found["tasks_solved"] = sum(each["error_share"] <= 0.05 for each in shares)
    return found


def judge(answers: AllPasses, name: str, model: Any) -> dict[str, float]:
    """Return error and mean passes of one task."""
    if name == "ponder":
        values = quality(answers, model.exit_policy())
        return {"error_share": 1 - values["accuracy"], "passes": values["passes"]}
    assert answers.halt_logits is not None
    mixed, passes, _ = universal(answers.step_logits, answers.halt_logits)
    wrong = (mixed.argmax(-1) != answers.labels).double().mean()
    return {"error_share": float(wrong), "passes": float(passes.double().mean())}
