"""A searched encoder (PAR-BERT) beside the interleaved one: masked tokens, SST-2 and forward time.

The search follows `configs/par-encoder.yaml` (WikiText-2, masked tokens) and derives within its
latency budget. The pattern found and the interleaved baseline are trained from new weights for the
same steps with the same seed, then fine-tuned on SST-2 with every seed, at full depth and for the
same epochs. Nothing is chosen on SST-2's development and test sets. Both encoders are then timed in
turns: segments as long as in training, and the development set. What is finished is left alone when
the command is given again, and what was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import interleaved as timed_in_turns
from deepenough.config import resolve
from deepenough.data.batches import by_length
from deepenough.data.classification import EncodedExamples, LabelledTexts, open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.hf.loading import load
from deepenough.par.config import (
    EvaluationTextConfig,
    ParEvalConfig,
    ParSearchConfig,
    ParTrainConfig,
    interleaved,
)
from deepenough.par.evaluation import evaluate
from deepenough.par.search import sample_segment
from deepenough.par.training import derive_run, search
from deepenough.par.training import train as pretrain
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.evaluation import all_passes, load_classifier, quality
from deepenough.ponder.halting import FixedExit
from deepenough.ponder.training import train as fine_tune
from deepenough.runs import RunFolder

QUICK = False
SEEDS = [0, 1, 2]
CONFIG = Path(__file__).parent.parent / "configs" / "par-encoder.yaml"
MAX_LENGTH, BATCH_SIZE = 64, 32
REPORTED = {"dev": "valid", "test": "test"}
"""Splits of SST-2, by their names here."""


def measure(
    runs: str = "runs/par-encoder",
    search_steps: int = 3000,
    steps: int = 10000,
    epochs: float = 1.0,
    limit: int | None = None,
    text: str | None = None,
    rounds: int = 15,
    seeds: Sequence[int] = tuple(SEEDS),
    threads: int = 1,
) -> dict[str, Any]:
    """Search, train and fine-tune what is missing; return qualities and times of both encoders.

    Args:
        runs: Folder of the runs.
        search_steps: Steps of the search.
        steps: Steps of the training of each encoder.
        epochs: Epochs of every fine-tuning.
        limit: Training examples of SST-2, for a trial.
        text: Text in the place of the configuration's, for a trial.
        rounds: Rounds of timing.
        seeds: Seeds of the fine-tunings.
        threads: Threads of all that is computed.
    """
    torch.set_num_threads(threads)
    folder, settings = Path(runs), resolve(ParSearchConfig, str(CONFIG))
    settings.train = replace(settings.train, steps=search_steps, threads=threads)
    settings.data = text or settings.data
    texts = open_classification("sst2", ClassificationConfig())
    texts = replace(texts, splits={**texts.splits, "train": texts.splits["train"][:limit]})
    patterns = {
        "searched": find_pattern(folder / "search", settings),
        "baseline": interleaved(len(settings.model.pattern or "")),
    }
    results: dict[str, dict[str, Any]] = {}
    classifiers: dict[str, Path] = {}
    for name, pattern in patterns.items():
        encoder = train_encoder(folder / pattern, pattern, steps, settings)
        tuned = [tune(folder, pattern, seed, epochs, texts, threads) for seed in seeds]
        classifiers[name] = tuned[0]
        scores = [accuracies(run, texts) for run in tuned]
        results[name] = {
            "attention": pattern.count("a"),
            "dense": pattern.count("d"),
            "masked": masked_quality(encoder, settings),
            "accuracy": {
                split: {f"seed_{seed}": own[split] for seed, own in zip(seeds, scores, strict=True)}
                | {"mean": statistics.mean(own[split] for own in scores)}
                for split in REPORTED
            },
        }
        print(f"{name} {pattern}: {results[name]}", flush=True)
    for what, functions in {
        "segments": {name: read_segments(folder / patterns[name]) for name in patterns},
        "sentences": {name: read_sentences(classifiers[name], texts) for name in patterns},
    }.items():
        timings = timed_in_turns(functions, rounds, warmup=2)
        for name in patterns:
            results[name][what] = {
                "milliseconds": 1000 * min(timings.seconds[name]),
                "relative_time": timings.ratio(name, "baseline"),
            }
    own = {"config": f"configs/{CONFIG.name}", "threads": threads, "patterns": patterns}
    given = {"search_steps": search_steps, "steps": steps, "epochs": epochs, "seeds": list(seeds)}
    return {**results, "settings": own | given}


def find_pattern(folder: Path, settings: ParSearchConfig) -> str:
    """Return the pattern that the search finds within its budget, searching if need be."""
    if (folder / "model").exists():
        found = derive_run(RunFolder.open(folder), settings.search.budget)
    else:
        found = search(replace(settings, out=str(folder), resume=folder.exists()))
    print(f"searched {found.pattern}, {found.relative_cost:.3f} of the baseline", flush=True)
    return found.pattern


def train_encoder(folder: Path, pattern: str, steps: int, settings: ParSearchConfig) -> Path:
    """Train an encoder of a pattern from new weights, unless it is finished; return its folder."""
    if not (folder / "model").exists():
        pretrain(
            ParTrainConfig(
                out=str(folder),
                resume=folder.exists(),
                data=settings.data,
                dataset=settings.dataset,
                model=replace(settings.model, pattern=pattern),
                train=replace(settings.train, steps=steps),
            )
        )
    return folder


def masked_quality(folder: Path, settings: ParSearchConfig) -> dict[str, float]:
    """Return perplexity and accuracy on masked tokens of the validation split."""
    kept = folder / "valid.json"
    if not kept.exists():
        text = EvaluationTextConfig(batch_size=settings.dataset.batch_size)
        values = evaluate(ParEvalConfig(str(folder), settings.data, "valid", dataset=text))
        kept.write_text(json.dumps({name: values[name] for name in ("perplexity", "accuracy")}))
    found: dict[str, float] = json.loads(kept.read_text())
    return found


def tune(
    folder: Path, pattern: str, seed: int, epochs: float, texts: LabelledTexts, threads: int
) -> Path:
    """Fine-tune an encoder on SST-2 at full depth, unless it is finished; return its run."""
    run = folder / f"{pattern}-sst2-{seed}"
    if not (run / "model").exists():
        given = {
            "out": str(run),
            "resume": run.exists(),
            "epochs": epochs,
            "dataset.batch_size": BATCH_SIZE,
            "dataset.max_length": MAX_LENGTH,
            "model.encoder": str(folder / pattern),
            "ponder.objective": "last",
            "ponder.pooling": "mean",
            "train.lr": 1e-3,
            "head_lr": 1.0,
            "train.seed": seed,
            "train.threads": threads,
            "train.save_every": 500,
        }
        splits = {split: texts.splits[split] for split in ("train", "valid")}
        fine_tune(resolve(PonderTrainConfig, None, given), replace(texts, splits=splits))
    return run


def encoded(run: Path, texts: LabelledTexts, split: str) -> tuple[Any, EncodedExamples]:
    """Return a fine-tuned classifier, and a split of SST-2 as it reads it."""
    model, tokenizer = load_classifier(str(run))
    return model, EncodedExamples(texts.split(split), tokenizer, MAX_LENGTH, split)


def accuracies(run: Path, texts: LabelledTexts) -> dict[str, float]:
    """Return the accuracy of a classifier on the development and the test set."""
    kept = run / "accuracies.json"
    if not kept.exists():
        found = {
            name: quality(all_passes(*encoded(run, texts, split)), FixedExit())["accuracy"]
            for name, split in REPORTED.items()
        }
        kept.write_text(json.dumps(found))
    values: dict[str, float] = json.loads(kept.read_text())
    return values


def read_segments(folder: Path) -> Callable[[], Any]:
    """Return a function that runs an encoder, without a head, on a batch of whole segments."""
    encoder, _ = load(str(folder), kind="encoder")
    ids, _ = sample_segment(encoder, 16)  # type: ignore[arg-type]
    return torch.inference_mode()(lambda: encoder(ids))


def read_sentences(run: Path, texts: LabelledTexts) -> Callable[[], None]:
    """Return a function that labels the development set, in batches of similar length."""
    model, examples = encoded(run, texts, REPORTED["dev"])
    batches = [examples.batch(rows) for rows in by_length(examples.lengths, BATCH_SIZE)]

    @torch.inference_mode()
    def label() -> None:
        for batch in batches:
            model(**{name: column for name, column in batch.items() if name != "labels"})

    return label
