"""`deepenough evaluate`: perplexity of a trained model on a text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from deepenough.cli.parse import parse
from deepenough.data.config import DatasetConfig
from deepenough.errors import UserError


@dataclass
class EvaluateSettings:
    """Evaluate"""

    run: str
    """Folder of a finished run, or of a model."""

    split: str = "test"
    """Part of the corpus to read."""

    mem_len: int | None = None
    """Tokens of memory before each segment; by default as many as the model was trained with."""

    json: bool = False
    """Print one JSON object instead of a table."""

    length: int | None = None
    """Tokens of a segment; by default as in training."""

    data: str = "python"
    """Text to read."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)


def main(argv: list[str]) -> int:
    settings = parse(
        "evaluate",
        EvaluateSettings,
        argv,
        description="Perplexity per token and per word, bits per byte, tokens a second, on a\n"
        "text, with the model's own tokenizer, in segments as long as in training unless\n"
        "--length says otherwise.",
        example="deepenough evaluate --run runs/mine --corpus mytext.txt --split valid",
    )
    if settings.dataset.tokenizer is not None:
        raise UserError(
            "A model is measured with its own tokenizer: leave out --dataset.tokenizer."
        )
    from deepenough.par.evaluation import evaluate

    values = evaluate(
        settings.run,
        settings.data,
        settings.dataset,
        settings.split,
        settings.mem_len,
        settings.length,
    )
    if settings.json:
        print(json.dumps(values))
        return 0
    for name, value in values.items():
        print(f"{name.replace('_', ' '):24}{value:,.4g}")
    return 0
