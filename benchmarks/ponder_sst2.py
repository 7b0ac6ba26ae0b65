"""Pondering on SST-2 with MiniLM: full-depth accuracy at a part of the layers, PABEE beside it.

    python benchmarks/ponder_sst2.py --runs runs/ponder-sst2 [--seeds 1] [--save]

For every seed the same encoder is fine-tuned three times with the same data, steps and settings:
at full depth, with pondering, and with PABEE's weighted losses. Then all three are measured on the
development set: full depth as it is; pondering at the thresholds, on the probability of the answer
and on that of having halted, that were best within the budget of layers on the labelled test set,
where full depth is measured too; the frontier of all thresholds, patiences and fixed
exits; and the seconds of inference that really stops beside those of all layers, taking turns.

A run that is interrupted goes on where it stopped when the command is given again; what is finished
is left alone. One epoch of one model takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import RESULTS, save_result

from deepenough.config import resolve
from deepenough.data.classification import ClassificationConfig, LabelledTexts, open_classification
from deepenough.data.classification_batches import EncodedExamples
from deepenough.ponder import evaluation as evaluation
from deepenough.ponder.config import PonderTrainConfig
from deepenough.ponder.evaluation import load_classifier, time_exits
from deepenough.ponder.halting import ConfidenceExit, FixedExit, QuantileExit
from deepenough.ponder.training import train
from deepenough.report import style
from deepenough.report.ponder import draw_passes, draw_ponder_frontier
from deepenough.report.ponder_halting import draw_halting
from deepenough.report.source import Run
from deepenough.runs import Record

CONFIG = Path(__file__).parent.parent / "configs" / "ponder-sst2.yaml"
#: What is trained, by the name it has in the pictures.
EXITS = {"last": "fixed", "ponder": "confidence", "weighted": "patience"}
MAX_LENGTH = 64
THRESHOLDS = {"quantile": QuantileExit, "confidence": ConfidenceExit}
BUDGET = 0.6
"""Share of the layers that a threshold may take on average."""
CHOOSE, REPORT = "valid", "dev"
"""Names here of the labelled test set, to choose a threshold on, and of the development set."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None, help="training examples, for a trial")
    parser.add_argument("--epochs", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    texts = arrange(open_classification(ClassificationConfig("sst2")), arguments.limit)
    results = []
    records: list[Record] = []
    for seed in range(arguments.seeds):
        folders = {name: fine_tune(arguments, name, seed, texts) for name in EXITS}
        result, found = compare(folders, texts, arguments.rounds)
        results.append({"seed": seed} | result)
        records = records or found
        print(f"seed {seed}: {result}", flush=True)
    summary = {"config": f"configs/{CONFIG.name}", "mean": mean_of(results), "seeds": results}
    save_result("ponder_sst2", summary, arguments.save)
    draw(records, RESULTS if arguments.save else arguments.runs)


def arrange(texts: LabelledTexts, limit: int | None) -> LabelledTexts:
    splits = texts.splits
    train = splits["train"][:limit]
    return replace(texts, splits={"train": train, CHOOSE: splits["test"], REPORT: splits["valid"]})


def fine_tune(arguments: argparse.Namespace, name: str, seed: int, texts: LabelledTexts) -> Path:
    folder = arguments.runs / f"{name}-{seed}"
    if (folder / "model").is_dir():
        return folder
    settings = resolve(PonderTrainConfig, CONFIG)
    settings.run = replace(settings.run, folder=str(folder), resume=folder.exists())
    settings.ponder = replace(settings.ponder, objective=name, exit=EXITS[name])
    settings.train = replace(settings.train, seed=seed)
    if arguments.epochs is not None:
        settings.epochs = arguments.epochs
    train(settings, replace(texts, splits={k: texts.splits[k] for k in ("train", CHOOSE)}))
    return folder


def compare(
    folders: dict[str, Path], texts: LabelledTexts, rounds: int
) -> tuple[dict[str, Any], list[Record]]:
    """The figures of one seed, and what the pictures need."""
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
    pondering = evaluation.quality(dev["ponder"], policy)
    seconds = {"last": math.inf, "ponder": math.inf}
    for _ in range(rounds):
        for name, exit_ in (("last", FixedExit()), ("ponder", policy)):
            timed = time_exits(models[name][0], encoded[REPORT], {name: exit_}, rounds=1)
            seconds[name] = min(seconds[name], timed[name]["seconds"])
    records: list[Record] = []
    shown = [row.text for row in texts.split(REPORT)]
    for name, own in dev.items():
        stops = policy if name == "ponder" else FixedExit()
        about = {"model": name, "split": REPORT, "evaluation": 1}
        records += evaluation.records(own, stops, texts.labels, shown, step=0, about=about)
    result = {
        "full_depth": full,
        "exit": EXITS["ponder"],
        "test_full_depth": evaluation.quality(answers[CHOOSE]["last"], FixedExit()),
        "test_by_exit": chosen,
        "thresholds": {name: point["setting"] for name, point in chosen.items()},
        "by_exit": {name: evaluation.quality(dev["ponder"], each) for name, each in exits.items()},
        "pondering": pondering,
        "accuracy_difference": pondering["accuracy"] - full["accuracy"],
        "share_of_layers": pondering["share"],
        "seconds_full_depth": seconds["last"],
        "seconds_pondering": seconds["ponder"],
        "faster": seconds["last"] / seconds["ponder"],
        "frontier": [r.values for r in records if r.kind == evaluation.EXIT],
    }
    return result, records


def choose(answers: evaluation.AllPasses, policy: str) -> dict[str, Any]:
    """The most accurate threshold within the budget; of equals the one with fewer passes."""
    points = [point for point in evaluation.sweep(answers) if point["policy"] == policy]
    within = [point for point in points if point["share"] <= BUDGET] or points[:1]
    return max(within, key=lambda p: (p["accuracy"], -p["passes"]))


def mean_of(results: list[dict[str, Any]]) -> dict[str, float]:
    names = ("accuracy_difference", "share_of_layers", "faster")
    return {name: statistics.mean(result[name] for result in results) for name in names}


def draw(records: list[Record], folder: Path) -> None:
    run = Run("MiniLM on SST-2", records)
    pictures = {"frontier": draw_ponder_frontier, "passes": draw_passes, "halting": draw_halting}
    for name, draw_one in pictures.items():
        figure = draw_one(run)
        if figure is not None:
            style.save(figure, folder / f"ponder_sst2_{name}")


if __name__ == "__main__":
    main()
