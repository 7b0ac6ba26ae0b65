"""Pondering on SST-2 keeps nearly the accuracy of full depth with 56 % of the layers.

For every seed the same encoder (MiniLM) is fine-tuned three times with the same data, steps and
settings: at full depth, with pondering, and with PABEE's weighted losses. Then all three are
measured on the development set: full depth as it is; pondering at the thresholds, on the
probability of the answer and on that of having halted, that were best within the budget of layers
on the labelled test set, where full depth is measured too; and all thresholds, patiences and fixed
exits. Inference that really stops is timed in turns with all layers. What is finished is left alone
when the command is given again. One epoch of one model takes some minutes on two cores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import interleaved
from deepenough.config import resolve
from deepenough.data.batches import by_length
from deepenough.data.classification import EncodedExamples, LabelledTexts, open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.ponder import evaluation
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.evaluation import load_classifier
from deepenough.ponder.halting import ConfidenceExit, FixedExit, HaltingPolicy, QuantileExit
from deepenough.ponder.modeling import PonderClassifier
from deepenough.ponder.training import train

QUICK = False
SEEDS = [0]
CONFIG = Path(__file__).parent.parent / "configs" / "ponder-sst2.yaml"
#: What is trained, by the name it has in the pictures.
EXITS = {"last": "fixed", "ponder": "confidence", "weighted": "patience"}
MAX_LENGTH, BATCH_SIZE = 64, 32
THRESHOLDS = {"quantile": QuantileExit, "confidence": ConfidenceExit}
BUDGET = 0.6
"""Share of the layers that a threshold may take on average."""
CHOOSE, REPORT = "valid", "dev"
"""Names here of the labelled test set, to choose a threshold on, and of the development set."""


def measure(
    runs: str = "runs/ponder-sst2",
    epochs: float | None = 1.0,
    rounds: int = 3,
    limit: int | None = None,
) -> dict[str, Any]:
    """Fine-tune what is missing and return accuracies, layers and times.

    Args:
        runs: Folder of the runs.
        epochs: Epochs of every fine-tuning; None for the configuration's.
        rounds: Rounds of timing.
        limit: Training examples, for a trial.
    """
    texts = arrange(open_classification("sst2", ClassificationConfig()), limit)
    results = {}
    for seed in SEEDS:
        folders = {name: fine_tune(Path(runs), name, seed, texts, epochs) for name in EXITS}
        results[f"seed_{seed}"] = compare(folders, texts, rounds)
    return {**results, "settings": {"config": f"configs/{CONFIG.name}", "exit": EXITS["ponder"]}}


def arrange(texts: LabelledTexts, limit: int | None) -> LabelledTexts:
    """Return the splits: to train on, to choose a threshold on, and to report on."""
    splits = texts.splits
    train = splits["train"][:limit]
    return replace(texts, splits={"train": train, CHOOSE: splits["test"], REPORT: splits["valid"]})


def fine_tune(runs: Path, name: str, seed: int, texts: LabelledTexts, epochs: float | None) -> Path:
    """Fine-tune one objective, unless it is finished, and return its run folder."""
    folder = runs / f"{name}-{seed}"
    if (folder / "model").is_dir():
        return folder
    given: dict[str, Any] = {
        "ponder.objective": name,
        "ponder.exit": EXITS[name],
        "train.seed": seed,
    }
    given |= {"out": str(folder), "resume": folder.exists()}
    if epochs is not None:
        given["epochs"] = epochs
    train(
        resolve(PonderTrainConfig, CONFIG, given),
        replace(texts, splits={k: texts.splits[k] for k in ("train", CHOOSE)}),
    )
    return folder


def compare(folders: dict[str, Path], texts: LabelledTexts, rounds: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    models = {name: load_classifier(str(folder)) for name, folder in folders.items()}
    encoded: dict[str, EncodedExamples] = {}
    answers: dict[str, dict[str, evaluation.AllPasses]] = {CHOOSE: {}, REPORT: {}}
    for name, (model, tokenizer) in models.items():
        for split in answers:
            encoded[split] = EncodedExamples(texts.split(split), tokenizer, MAX_LENGTH, split)
            answers[split][name] = evaluation.all_passes(model, encoded[split])
    dev = answers[REPORT]
    full = evaluation.quality(dev["last"], FixedExit())
    chosen = {name: choose(answers[CHOOSE]["ponder"], name) for name in THRESHOLDS}
    exits = {name: THRESHOLDS[name](point["setting"]) for name, point in chosen.items()}
    policy = exits[EXITS["ponder"]]
    by_exit = {name: evaluation.quality(dev["ponder"], each) for name, each in exits.items()}
    timings = interleaved(
        {
            name: lambda name=name, exit_=exit_: label_all(models[name][0], encoded[REPORT], exit_)
            for name, exit_ in (("last", FixedExit()), ("ponder", policy))
        },
        rounds,
    )
    return {
        "full_depth": full,
        "by_exit": by_exit,
        "accuracy_difference": by_exit[EXITS["ponder"]]["accuracy"] - full["accuracy"],
        "test_full_depth": evaluation.quality(answers[CHOOSE]["last"], FixedExit()),
        "test_by_exit": {
            name: {key: value for key, value in point.items() if key != "policy"}
            for name, point in chosen.items()
        },
        "seconds_full_depth": timings.best("last"),
        "seconds_pondering": timings.best("ponder"),
        "faster": timings.ratio("last", "ponder"),
        "frontier": {
            model: {
                f"{point['policy']}_{point['setting']:g}": {
                    key: point[key] for key in ("accuracy", "passes")
                }
                for point in evaluation.sweep(passes)
            }
            for model, passes in dev.items()
        },
    }


@torch.inference_mode()
def label_all(model: PonderClassifier, examples: EncodedExamples, policy: HaltingPolicy) -> None:
    """Label all examples with inference that stops, in batches of similar length."""
    for rows in by_length(examples.lengths, BATCH_SIZE):
        batch = examples.batch(rows, model.device)
        batch.pop("labels")
        model(**batch, policy=policy)


def choose(answers: evaluation.AllPasses, policy: str) -> dict[str, Any]:
    """Return the most accurate threshold within the budget; of equals the one with fewer passes."""
    points = [point for point in evaluation.sweep(answers) if point["policy"] == policy]
    within = [point for point in points if point["share"] <= BUDGET] or points[:1]
    return max(within, key=lambda p: (p["accuracy"], -p["passes"]))
