"""Pondering on SST-2 is within 0.5 points of full depth with at most 60 % of the layers.

For every seed the same encoder (MiniLM) is fine-tuned with the same data, steps and settings at
full depth and with pondering, if asked for with PABEE's weighted losses too. Everything is chosen
on training data alone: whole sentences are taken out of the training split together with every
phrase of theirs, since SST-2 lists the phrases of a sentence as examples of their own, and on them
the exit, its threshold and nothing else is chosen within a budget of layers. The development set
and the labelled test set are then measured once, at that exit and at full depth. Inference that
really stops is timed in turns with all layers. What is finished is left alone when the command is
given again, and what was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import interleaved
from deepenough.config import resolve
from deepenough.data.batches import by_length
from deepenough.data.classification import (
    EncodedExamples,
    Example,
    LabelledTexts,
    open_classification,
)
from deepenough.data.config import ClassificationConfig
from deepenough.ponder import evaluation
from deepenough.ponder.config import PonderTrainConfig, options_of
from deepenough.ponder.evaluation import load_classifier
from deepenough.ponder.halting import HaltingPolicy
from deepenough.ponder.modeling import PonderClassifier
from deepenough.ponder.training import train

QUICK = False
SEEDS = [0, 1, 2]
CONFIG = Path(__file__).parent.parent / "configs" / "ponder-sst2.yaml"
BATCH_SIZE = 32
"""Of the inference that is timed."""
SENTENCES, MIN_WORDS = 800, 8
"""Sentences that are held out, and words that tell a sentence from a phrase."""
PHRASE_WORDS = 3
"""Phrases of fewer words belong to no sentence in particular and stay."""
CHOOSE, REPORT = "valid", {"dev": "valid", "test": "test"}
"""Name of the held-out split in training, and the splits of SST-2 by their names here."""


def measure(
    runs: str = "runs/ponder-sst2",
    weighted: bool = False,
    epochs: float | None = None,
    rounds: int = 3,
    limit: int | None = None,
    sentences: int = SENTENCES,
    seeds: Sequence[int] = SEEDS,
    threads: int = 1,
) -> dict[str, Any]:
    """Fine-tune what is missing and return accuracies, layers and times.

    Args:
        runs: Folder of the runs.
        weighted: Fine-tune PABEE's weighted losses as well.
        epochs: Epochs of every fine-tuning; None for the configuration's.
        rounds: Rounds of timing.
        limit: Training examples, for a trial.
        sentences: Sentences held out for choosing exits.
        seeds: Seeds of the fine-tunings.
        threads: Threads of all that is computed.
    """
    torch.set_num_threads(threads)
    texts = open_classification("sst2", ClassificationConfig())
    kept, held_out = hold_out(texts.splits["train"], sentences)
    trained = replace(texts, splits={"train": kept[:limit], CHOOSE: held_out})
    objectives = ["last", "ponder"] + ["weighted"] * weighted
    folders = {
        name: [fine_tune(Path(runs), name, seed, trained, epochs) for seed in seeds]
        for name in objectives
    }
    by_seed = {
        f"seed_{seed}": compare(
            {name: folders[name][number] for name in objectives}, texts, held_out, rounds
        )
        for number, seed in enumerate(seeds)
    }
    results = {"mean": mean_of(list(by_seed.values())), **by_seed}
    exits = {name: found.pop("settings") for name, found in by_seed.items()}
    training = {"examples": len(trained.splits["train"]), "held_out": len(held_out)}
    settings = {"config": f"configs/{CONFIG.name}", **training, "exits": exits}
    return {**results, "settings": settings | {"seeds": list(seeds)}}


def hold_out(examples: Sequence[Example], num: int) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on, and whole sentences of which no phrase is among them.

    A sentence is an example that is no part of another one.
    """
    by_text = {example.text: example for example in examples}
    everything = "\n".join(["", *sorted(by_text, key=len, reverse=True), ""])
    long = [text for text in by_text if len(text.split()) >= MIN_WORDS]
    random.Random(0).shuffle(long)
    whole = (text for text in long if everything.find(text) == everything.find(f"\n{text}\n") + 1)
    sentences = [text for text, _ in zip(whole, range(num), strict=False)]
    held_out = "\n".join(sentences)
    kept = [
        example
        for example in examples
        if len(example.text.split()) < PHRASE_WORDS or example.text not in held_out
    ]
    return kept, [by_text[text] for text in sentences]


def fine_tune(runs: Path, name: str, seed: int, texts: LabelledTexts, epochs: float | None) -> Path:
    """Fine-tune one objective, unless it is finished, and return its run folder."""
    folder = runs / f"{name}-{seed}"
    if (folder / "model").is_dir():
        return folder
    given: dict[str, Any] = {"ponder.objective": name, "train.seed": seed}
    given |= {"out": str(folder), "resume": folder.exists()}
    if name == "last":
        given |= {"ponder.exit": "fixed", "ponder.exit_budget": None}
    if epochs is not None:
        given["epochs"] = epochs
    train(resolve(PonderTrainConfig, CONFIG, given), texts)
    return folder


def compare(
    folders: dict[str, Path], texts: LabelledTexts, held_out: list[Example], rounds: int
) -> dict[str, Any]:
    """Return the figures of one seed; each model stops as was chosen when it was trained."""
    limit = resolve(PonderTrainConfig, CONFIG, {}).dataset.max_length
    splits = {name: texts.split(split) for name, split in REPORT.items()} | {"held_out": held_out}
    models = {name: load_classifier(str(folder)) for name, folder in folders.items()}
    results: dict[str, Any] = {name: {} for name in splits} | {"frontier": {}}
    exits = {}
    for name, (model, tokenizer) in models.items():
        exits[name] = options_of(model.config).exit_setting
        for split, rows in splits.items():
            examples = EncodedExamples(rows, tokenizer, limit, split)
            answers = evaluation.all_passes(model, examples)
            results[split][name] = evaluation.quality(answers, model.exit_policy())
            if split == "dev":
                results["frontier"][name] = frontier(answers)
    for split in splits:
        found = results[split]
        lost = found["ponder"]["accuracy"] - found["last"]["accuracy"]
        found["accuracy_difference"] = lost
    examples = EncodedExamples(splits["dev"], models["last"][1], limit, "dev")
    timings = interleaved(
        {
            name: lambda model=models[name][0]: label_all(model, examples, model.exit_policy())
            for name in ("last", "ponder")
        },
        rounds,
    )
    results |= {
        "seconds_full_depth": timings.best("last"),
        "seconds_pondering": timings.best("ponder"),
        "faster": timings.ratio("last", "ponder"),
    }
    return results | {"settings": exits}


def frontier(answers: evaluation.AllPasses) -> dict[str, Any]:
    """Return accuracy and passes of every exit, and of the last pass alone."""
    points = evaluation.sweep(answers)
    return {
        f"{point['policy']}_{point['setting']:g}": {k: point[k] for k in ("accuracy", "passes")}
        for point in points
    }


def mean_of(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds of what the models do at their exits."""
    result: dict[str, Any] = {}
    for split in (*REPORT, "held_out"):
        found = [seed[split] for seed in seeds]
        result[split] = {
            "accuracy_difference": statistics.mean(each["accuracy_difference"] for each in found)
        }
        for name in found[0].keys() - {"accuracy_difference"}:
            result[split][name] = {
                key: statistics.mean(each[name][key] for each in found)
                for key in ("accuracy", "passes", "share")
            }
    return result


@torch.inference_mode()
def label_all(model: PonderClassifier, examples: EncodedExamples, policy: HaltingPolicy) -> None:
    """Label all examples with inference that stops, in batches of similar length."""
    for rows in by_length(examples.lengths, BATCH_SIZE):
        batch = examples.batch(rows, model.device)
        batch.pop("labels")
        model(**batch, policy=policy)
