"""Learning to Execute: Lazy, Universal Transformer and Transformer with equally many parameters.

    python benchmarks/lazy_execute.py train --runs runs/lazy-execute [--seeds 0 1]
    python benchmarks/lazy_execute.py measure --runs runs/lazy-execute [--seeds 0 1] [--save]

All read the same programs (additions and copies of up to three digits, programs of up to two nested
operations), as many of them, in the same order, and write their answers last digit first. The
Transformer shares no block, so it is half as wide. An interrupted training goes on where it stopped
when the command is given again; what is finished is left alone. The table is exact match on
programs that none of them was trained on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import save_result

from deepenough.config import resolve
from deepenough.lazy.config import ProgramConfig, ProgramEvalConfig, ProgramTrainConfig
from deepenough.lazy.evaluation import load_translator
from deepenough.lazy.programs import evaluate_programs, train_programs
from deepenough.training.config import RunSettings, TrainingConfig

STEPS = 4
WIDTHS = {"lazy": 128, "universal": 128, "transformer": 64}
"""A Transformer has a block for each of its four steps; a block's size is its width squared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["train", "measure"])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--mechanisms", nargs="*", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    pairs = [(mechanism, seed) for seed in arguments.seeds for mechanism in arguments.mechanisms]
    folders = [arguments.runs / f"{mechanism}-{seed}" for mechanism, seed in pairs]
    if arguments.action == "train":
        for folder, (mechanism, seed) in zip(folders, pairs, strict=True):
            train_programs(settings_of(folder, mechanism, seed, arguments.steps))
        return
    table = [figures(folder) for folder in folders if (folder / "model").is_dir()]
    save_result("lazy_execute", {"models": table}, arguments.save)


def settings_of(folder: Path, mechanism: str, seed: int, steps: int) -> ProgramTrainConfig:
    width = WIDTHS[mechanism]
    return ProgramTrainConfig(
        run=RunSettings(str(folder), resume=folder.exists()),
        data=ProgramConfig(
            kinds=["addition", "copy", "program"], length=3, nesting=2, reverse=True, batch_size=64
        ),
        model=replace(
            ProgramTrainConfig().model,
            mechanism=mechanism,
            d_model=width,
            d_ff=4 * width,
            num_heads=4,
            encoder_steps=STEPS,
            decoder_steps=STEPS,
        ),
        train=TrainingConfig(
            steps=steps,
            lr=1.5e-3,
            warmup=400,
            betas=[0.9, 0.98],
            threads=1,
            seed=seed,
            valid_every=1000,
            save_every=500,
            log_every=100,
        ),
    )


def figures(folder: Path) -> dict[str, Any]:
    """Parameters, and exact match by kind and by difficulty."""
    settings = resolve(ProgramTrainConfig, folder / "config.yaml")
    values = evaluate_programs(ProgramEvalConfig(str(folder)))
    shown = {name: value for name, value in values.items() if name.startswith("exact")}
    return {
        "mechanism": settings.model.mechanism,
        "seed": settings.train.seed,
        "parameters": load_translator(str(folder)).model.num_parameters(),
        "d_model": settings.model.d_model,
        "steps": [settings.model.encoder_steps, settings.model.decoder_steps],
        "training_programs": settings.train.steps * settings.data.batch_size,
        "test_programs": values["programs"],
        **shown,
    }


if __name__ == "__main__":
    main()
