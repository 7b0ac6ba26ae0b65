"""Lazy executes more unseen programs than a Universal Transformer with equally many parameters.

Lazy, Universal Transformer and Transformer read the same programs (additions and copies of up to
three digits, programs of up to two nested operations), as many of them, in the same order, and
write their answers last digit first. The Transformer shares no block, so it is half as wide. An
interrupted training goes on where it stopped when the command is given again; what is finished is
left alone. Figures are exact match on programs that none of them was trained on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from deepenough.config import resolve
from deepenough.lazy.config import LazyEvalConfig, ProgramConfig, ProgramTrainConfig
from deepenough.lazy.evaluation import evaluate
from deepenough.lazy.inference import load_translator
from deepenough.lazy.programs import train_programs
from deepenough.training.config import TrainingConfig

QUICK = False
SEEDS = [0, 1]
STEPS = 4
Mechanism = Literal["lazy", "universal", "transformer"]
WIDTHS: dict[Mechanism, int] = {"lazy": 128, "universal": 128, "transformer": 64}
"""A Transformer has a block for each of its four steps; a block's size is its width squared."""


def measure(runs: str = "runs/lazy-execute", steps: int = 5000) -> dict[str, Any]:
    """Train all models for so many steps and return exact match by kind and difficulty."""
    found = {}
    for seed in SEEDS:
        for mechanism in WIDTHS:
            folder = Path(runs) / f"{mechanism}-{seed}"
            if not (folder / "model").is_dir():
                train_programs(settings_of(folder, mechanism, seed, steps))
            found[f"{mechanism}_{seed}"] = figures(folder)
    return found


def settings_of(folder: Path, mechanism: Mechanism, seed: int, steps: int) -> ProgramTrainConfig:
    """Return the settings of one training."""
    width = WIDTHS[mechanism]
    return ProgramTrainConfig(
        out=str(folder),
        resume=folder.exists(),
        dataset=ProgramConfig(
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
    """Return parameters, and exact match by kind and by difficulty."""
    settings = resolve(ProgramTrainConfig, folder / "config.yaml")
    values = evaluate(LazyEvalConfig(str(folder)))
    shown = {
        name: value
        for name, value in values.items()
        if name.startswith("exact") and name != "exact_by"
    }
    return {
        "parameters": load_translator(str(folder)).model.num_parameters(),
        "d_model": settings.model.d_model,
        "training_programs": settings.train.steps * settings.dataset.batch_size,
        "test_programs": values["programs"],
        **shown,
        "exact_by": {
            f"{row['kind']}_nesting_{row['nesting']}_length_{row['length']}": {
                "exact": row["exact"],
                "programs": row["programs"],
            }
            for row in values["exact_by"]
        },
    }
